"""Parameters of the choice of one request's tokens, each declared once with its check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vlm_batch.advice import SAMPLING, advises_of_fields
from vlm_batch.checks import MOST
from vlm_batch.errors import InvalidParameters
from vlm_batch.parameters import (
    Flag,
    RealNumber,
    TrueOrFalse,
    WholeNumber,
    declared,
    parameters_of,
)
from vlm_batch.types.lists import Biases, Functions, JsonSchema, Text, Texts, TokenIds

#: ``(tokens so far (T,), logits (1, V)) -> logits (1, V)``, as in mlx-lm; called on the engine's thread.
LogitsProcessor: TypeAlias = Callable[[Any, Any], Any]

#: Parameters that constrain the form of an answer.
FORMS = ("json_schema", "regex", "grammar", "choice")
#: Parameters that end an answer elsewhere than its form does.
_ENDS = ("stop", "stop_token_ids", "ignore_eos")
#: Parameters that say how ``no_repeat_ngram_size`` is meant.
_OF_NGRAMS = ("window_size", "whitelist_token_ids")
#: Bounds on stop strings and stop tokens: each token is compared with them while other requests wait.
_MOST_STOPS, _MOST_STOP_TOKENS = 1024, 2**14
#: Bounds on bad words, allowed tokens (more than any vocabulary) and tokens with a bias.
_MOST_WORDS, _MOST_ALLOWED, _MOST_BIASED = 1024, 2**20, 2**16
#: Bound on choices. Forms have a bound of their own, in characters, which is reached before.
_MOST_CHOICES = 2**20
#: The largest number below 1.
_BELOW_1 = math.nextafter(1, 0)
#: OpenAI's bounds of penalties.
_PENALTY = RealNumber(-2, 2, "a number in -2..2 (0 is off)")


@advises_of_fields(SAMPLING)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters for choosing one request's tokens.

    An answer has at most one form: ``json_schema``, ``regex``, ``grammar`` or ``choice``. Thinking precedes it. An
    answer that ends with "length" may be incomplete. A form excludes ``stop``, ``stop_token_ids`` and ``ignore_eos``.

    Args:
        max_tokens: most tokens of the answer. 0, with ``prompt_logprobs``, reads the prompt and answers nothing.
        temperature: divisor of the logits; 0 is greedy.
        top_p: keep the most likely tokens until their probabilities reach this; 1 is off.
        top_k: keep this many most likely tokens; 0 is off.
        min_p: drop tokens below this times the highest probability; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of recent tokens (Keskar et al. 2019); 1 is
            off.
        repetition_context_size: number of recent tokens.
        no_repeat_ngram_size: no sequence of this many tokens occurs twice in the answer; 0 is off. OCR models that fall
            into loops need it: DeepSeek-OCR's authors take 30, with a window of 90.
        window_size: number of the answer's last tokens in which such a sequence is looked for; None: the whole answer.
        whitelist_token_ids: tokens that may complete such a sequence all the same, such as ``<td>`` and ``</td>``.
        seed: makes sampling reproducible in any batch. None draws a fresh seed.
        stop: strings that end the answer, which leaves them out.
        stop_token_ids: tokens that end it, beside the model's own.
        ignore_eos: do not end at the model's own end tokens.
        logprobs: report each step's log-probabilities of the chosen token and of this many most likely ones, after
            processors and before the temperature.
        prompt_logprobs: likewise for the prompt's tokens. The request then reuses nothing of earlier ones, and excludes
            ``cache`` and ``return_cache``.
        logits_processors: functions ``(tokens (T,), logits (1, V)) -> logits (1, V)`` of prompt and answer, as in
            mlx-lm.
        presence_penalty: subtracted from logits of the answer's tokens (OpenAI's definition).
        frequency_penalty: subtracted per occurrence in the answer (OpenAI's definition).
        logit_bias: numbers in -100..100 added to tokens' logits.
        allowed_token_ids: exclude all other tokens; None allows all.
        bad_words: texts that may not occur, tokenized with or without a space before.
        min_tokens: fewest tokens of the answer; stop strings do not count before.
        n: number of answers, with the seeds ``seed``, ``seed + 1``, ...
        skip_special_tokens: leave special tokens such as ``<|box_start|>`` out of the text. False shows all but the one
            that ends the answer. None: out, but for checkpoints that answer in such tokens
            (``ModelSpec.special_tokens``).
        thinking_budget: most tokens of thinking; None sets no bound.
        json_schema: a mapping, JSON text or a pydantic model's class.
        regex: regular expression of the whole answer.
        grammar: Lark grammar, as llguidance reads it.
        choice: texts to choose from.

    Raises:
        InvalidParameters: a value is out of range.
    """

    # HTTP spells it in two ways, and the server bounds it.
    max_tokens: int = declared(
        256,
        WholeNumber(0, 2**63 - 1),
        flag=Flag("longest answer", "N", says_default=True),
        over_http=False,
    )
    # Within these bounds, logits of float32 or less do not overflow.
    temperature: float = declared(
        0.0,
        RealNumber(1e-6, 1e6, "0 (greedy) or a number in 1e-6..1e6", or_zero=True),
        flag=Flag("0 is greedy", "T", says_default=True),
    )
    top_p: float = declared(
        1.0,
        RealNumber(1e-30, 1, "a number above 0 (1e-30) and at most 1 (1 is off)"),
        flag=Flag("1 is off", "P", says_default=True),
    )
    top_k: int = declared(
        0, WholeNumber(0, MOST), flag=Flag("0 is off", "K", says_default=True)
    )
    min_p: float = declared(
        0.0,
        RealNumber(0, _BELOW_1, "a number of at least 0 and below 1 (0 is off)"),
        flag=Flag("0 is off", "P", says_default=True),
    )
    repetition_penalty: float = declared(
        1.0,
        RealNumber(1e-3, 1e3, "a number in 0.001..1000 (1 is off)"),
        flag=Flag("of words that come again; 1 is off", "P"),
    )
    repetition_context_size: int = declared(20, WholeNumber(1, MOST))
    # HTTP has them among vLLM's arguments, as vLLM does.
    no_repeat_ngram_size: int = declared(
        0,
        WholeNumber(0, MOST),
        flag=Flag("no N tokens of an answer twice; 0 is off", "N"),
        over_http=False,
    )
    window_size: int | None = declared(
        None,
        WholeNumber(1, MOST),
        flag=Flag("last tokens in which they are looked for (default: all)", "N"),
        over_http=False,
    )
    whitelist_token_ids: Sequence[int] = declared(
        (), TokenIds(_MOST_ALLOWED), over_http=False
    )
    seed: int | None = declared(
        None,
        WholeNumber(0, 2**64 - 1),
        flag=Flag("makes sampled answers reproducible, whatever the batch", "N"),
    )
    stop: Sequence[str] = declared(
        (),
        Texts(_MOST_STOPS),
        flag=Flag(
            "text that ends an answer; may be repeated", "TEXT", is_repeated=True
        ),
    )
    stop_token_ids: Sequence[int] = declared((), TokenIds(_MOST_STOP_TOKENS))
    ignore_eos: bool = declared(False, TrueOrFalse())
    logprobs: int | None = declared(None, WholeNumber(0, 100), over_http=False)
    prompt_logprobs: int | None = declared(None, WholeNumber(0, 100))
    logits_processors: Sequence[LogitsProcessor] = declared(
        (),
        Functions("callables (tokens, logits) -> logits"),
        in_jobs=False,
        over_http=False,
    )
    presence_penalty: float = declared(0.0, _PENALTY)
    frequency_penalty: float = declared(0.0, _PENALTY)
    logit_bias: Mapping[int, float] = declared(
        {}, Biases(_MOST_BIASED), is_hashed=False
    )
    allowed_token_ids: Sequence[int] | None = declared(
        None, TokenIds(_MOST_ALLOWED, least=1)
    )
    bad_words: Sequence[str] = declared((), Texts(_MOST_WORDS))
    min_tokens: int = declared(0, WholeNumber(0, 2**63 - 1))
    n: int = declared(1, WholeNumber(1, 128), over_http=False)
    skip_special_tokens: bool | None = declared(
        None,
        TrueOrFalse("True, False or None"),
        flag=Flag(
            "leave special tokens such as <|box_start|> out of answers, or show them (default: as the model needs)"
        ),
    )
    thinking_budget: int | None = declared(
        None, WholeNumber(0, 2**63 - 1), flag=Flag("most tokens of thinking", "N")
    )
    # HTTP spells the forms as its clients do.
    json_schema: Mapping[str, Any] | type | str | None = declared(  # noqa: RUF009
        None,
        JsonSchema(),
        flag=Flag(
            "answers are JSON that follows this schema; --columns may name the fields of its object",
            "FILE",
        ),
        over_http=False,
        is_hashed=False,
    )
    regex: str | None = declared(
        None,
        Text(),
        flag=Flag("answers match a regular expression", "PATTERN"),
        over_http=False,
    )
    grammar: str | None = declared(None, Text(), over_http=False)
    choice: Sequence[str] | None = declared(
        None,
        Texts(_MOST_CHOICES, least=1),
        flag=Flag("answers are one of these texts", "TEXT", is_repeated=True),
        over_http=False,
    )

    def __post_init__(self) -> None:
        for one in SAMPLING_PARAMETERS:
            value = getattr(self, one.name)
            if value is not one.default:
                checked = one.check.checked(one.name, value)
                object.__setattr__(self, one.name, checked)
        self._check_ngrams()
        self._check_one_form()
        self._check_lengths()

    def _check_ngrams(self) -> None:
        size, window = self.no_repeat_ngram_size, self.window_size
        asked = self._asked_of(_OF_NGRAMS)
        if asked and not size:
            raise InvalidParameters(
                f"{asked[0]} belongs to no_repeat_ngram_size, which is 0 (off)"
            )
        if window is not None and window < size:
            raise InvalidParameters(
                f"window_size is {window}, below no_repeat_ngram_size, which is {size}: nothing would be found in it"
            )

    def _check_one_form(self) -> None:
        forms = self._given_of(FORMS)
        if len(forms) > 1:
            raise InvalidParameters(
                f"{' and '.join(forms)} exclude each other: an answer has one form"
            )
        ends = self._asked_of(_ENDS)
        if forms and ends:
            raise InvalidParameters(
                f"{ends[0]} would end the answer elsewhere than {forms[0]} does; leave it out"
            )

    def _check_lengths(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise InvalidParameters(
                f"min_tokens is {self.min_tokens}, above max_tokens, which is {self.max_tokens}"
            )
        if self.max_tokens:
            return
        if self.prompt_logprobs is None:
            raise InvalidParameters(
                "max_tokens is 0; an answer has at least one token, but with prompt_logprobs"
            )
        if self.n > 1:
            raise InvalidParameters(
                f"n is {self.n}; with max_tokens=0 there is one answer, which is empty"
            )

    def _given_of(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if getattr(self, name) is not None]

    def _asked_of(self, names: Sequence[str]) -> list[str]:
        """Return the names of parameters that are neither None, False nor empty."""
        return [name for name in names if getattr(self, name)]

    @property
    def form(self) -> str | None:
        """Name of the parameter that constrains the form, or None."""
        return next(iter(self._given_of(FORMS)), None)


#: The parameters as they are declared, in the order of their fields.
SAMPLING_PARAMETERS = parameters_of(SamplingParams)
