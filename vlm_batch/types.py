"""Types that users meet: requests, parameters, events, results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields
from functools import partial
from io import IOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np

from vlm_batch.advice import (
    MEDIA,
    PROMPTS,
    SAMPLING,
    advises_of_fields,
    meant,
    of_params,
)
from vlm_batch.checks import (
    MOST,
    are_tokens,
    as_tuple,
    check_unicode,
    demand,
    is_flag,
    is_non_empty,
    is_real,
    is_whole,
    json_schema_of,
    non_empty_texts,
    set_pixel_bounds,
)
from vlm_batch.errors import (
    InvalidParameters,
    InvalidPrompt,
    InvalidRequest,
    RequestFailed,
    describe,
    let_go,
    shown,
)
from vlm_batch.options import Option, OptionScore, checked_options
from vlm_batch.parameters import (
    Flag,
    RealNumber,
    TrueOrFalse,
    WholeNumber,
    declared,
    parameters_of,
)

if TYPE_CHECKING:
    from vlm_batch.store.prompt import PromptCache

#: ``(tokens so far (T,), logits (1, V)) -> logits (1, V)``, as in mlx-lm; called on the engine's thread.
LogitsProcessor: TypeAlias = Callable[[Any, Any], Any]

#: A path, URL, data URI, ``bytes``, open file, PIL image, or array (H, W), (H, W, 3) or (H, W, 4) of uint8 or floats in 0..1.
ImageInput: TypeAlias = Any

#: A ``Video``, or what its ``source`` can be.
VideoInput: TypeAlias = Any

#: An ``Audio``, or what its ``source`` can be but for an array.
AudioInput: TypeAlias = Any

Message: TypeAlias = Mapping[str, Any]

Kind = TypeVar("Kind", "SamplingParams", "Template", "Request")

FinishReason = Literal["stop", "length", "cancelled", "error"]


#: Parameters that constrain the form of an answer.
FORMS = ("json_schema", "regex", "grammar", "choice")
#: Bounds on stop strings and stop tokens: each token is compared with them while other requests wait.
_MOST_STOPS, _MOST_STOP_CHARACTERS, _MOST_STOP_TOKENS = 1024, 2**20, 2**14
#: Bounds on bad words, allowed tokens (more than any vocabulary) and tokens with a bias.
_MOST_WORDS, _MOST_ALLOWED, _MOST_BIASED = 1024, 2**20, 2**16


def _is_too_much(texts: Sequence[str], most: int) -> bool:
    """Return whether texts are more than ``most``, or too long together to be looked for."""
    return len(texts) > most or sum(map(len, texts)) > _MOST_STOP_CHARACTERS


def _is_bias(bias: Mapping[Any, Any]) -> bool:
    if not are_tokens(bias):
        return False
    return all(is_real(value) and -100 <= value <= 100 for value in bias.values())


def _check_count(name: str, tokens: Sequence[Any]) -> None:
    if len(tokens) > _MOST_ALLOWED:
        raise InvalidParameters(
            f"{name} has {len(tokens):,} ids; {_MOST_ALLOWED:,} are the most"
        )


def _check_least(name: str, value: Any, least: int) -> None:
    is_right = is_whole(value) and value >= least
    demand(is_right, InvalidParameters, name, value, f"an integer of at least {least}")


def _paths(given: Any) -> tuple[str | Path, ...]:
    """Return one or several paths as a tuple."""
    is_one = isinstance(given, (str, Path))
    paths = (given,) if is_one else as_tuple("directories", given)
    are_paths = all(isinstance(one, (str, Path)) and str(one) for one in paths)
    is_right = are_paths and not isinstance(given, bytes)
    demand(is_right, InvalidParameters, "directories", given, "a sequence of paths")
    return paths


def _mappings(name: str, given: Any) -> list[dict[str, Any]]:
    is_sequence = isinstance(given, (list, tuple))
    is_right = is_sequence and all(isinstance(one, Mapping) for one in given)
    demand(is_right, InvalidPrompt, name, given, "a list of mappings, or None")
    return [dict(one) for one in given]


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _several(given: Any) -> tuple[Any, ...]:
    """Return one or several media as a tuple; an iterator is read, a file is one."""
    if given is None:
        return ()
    if isinstance(given, (list, tuple)):
        return tuple(given)
    is_read = isinstance(given, Iterator) and not isinstance(given, IOBase)
    return tuple(given) if is_read else (given,)


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
    max_tokens: int = field(
        default=256,
        metadata=declared(
            WholeNumber(0, 2**63 - 1),
            flag=Flag("longest answer", "N", says_default=True),
            over_http=False,
        ),
    )
    # Within these bounds, logits of float32 or less do not overflow.
    temperature: float = field(
        default=0.0,
        metadata=declared(
            RealNumber(
                lambda x: x == 0 or 1e-6 <= x <= 1e6,
                "0 (greedy) or a number in 1e-6..1e6",
            ),
            flag=Flag("0 is greedy", "T", says_default=True),
        ),
    )
    top_p: float = field(
        default=1.0,
        metadata=declared(
            RealNumber(
                lambda x: 1e-30 <= x <= 1,
                "a number above 0 (1e-30) and at most 1 (1 is off)",
            ),
            flag=Flag("1 is off", "P", says_default=True),
        ),
    )
    top_k: int = field(
        default=0,
        metadata=declared(
            WholeNumber(0, MOST), flag=Flag("0 is off", "K", says_default=True)
        ),
    )
    min_p: float = field(
        default=0.0,
        metadata=declared(
            RealNumber(
                lambda x: 0 <= x < 1, "a number of at least 0 and below 1 (0 is off)"
            ),
            flag=Flag("0 is off", "P", says_default=True),
        ),
    )
    repetition_penalty: float = field(
        default=1.0,
        metadata=declared(
            RealNumber(
                lambda x: 1e-3 <= x <= 1e3, "a number in 0.001..1000 (1 is off)"
            ),
            flag=Flag("of words that come again; 1 is off", "P"),
        ),
    )
    repetition_context_size: int = field(
        default=20, metadata=declared(WholeNumber(1, MOST))
    )
    # HTTP has them among vLLM's arguments, as vLLM does.
    no_repeat_ngram_size: int = field(
        default=0,
        metadata=declared(
            WholeNumber(0, MOST),
            flag=Flag("no N tokens of an answer twice; 0 is off", "N"),
            over_http=False,
        ),
    )
    window_size: int | None = field(
        default=None,
        metadata=declared(
            WholeNumber(1, MOST),
            flag=Flag(
                "number of last tokens in which they are looked for (default: all)", "N"
            ),
            over_http=False,
        ),
    )
    whitelist_token_ids: Sequence[int] = field(
        default=(), metadata=declared(over_http=False)
    )
    seed: int | None = field(
        default=None,
        metadata=declared(
            WholeNumber(0, 2**64 - 1),
            flag=Flag("makes sampled answers reproducible, whatever the batch", "N"),
        ),
    )
    stop: Sequence[str] = field(
        default=(),
        metadata=declared(
            flag=Flag(
                "text that ends an answer; several may be given",
                "TEXT",
                is_repeated=True,
            )
        ),
    )
    stop_token_ids: Sequence[int] = field(default=(), metadata=declared())
    ignore_eos: bool = field(default=False, metadata=declared(TrueOrFalse()))
    logprobs: int | None = field(
        default=None, metadata=declared(WholeNumber(0, 100), over_http=False)
    )
    prompt_logprobs: int | None = field(
        default=None, metadata=declared(WholeNumber(0, 100))
    )
    logits_processors: Sequence[LogitsProcessor] = field(
        default=(), metadata=declared(in_jobs=False, over_http=False)
    )
    presence_penalty: float = field(
        default=0.0,
        metadata=declared(
            RealNumber(lambda x: -2 <= x <= 2, "a number in -2..2 (0 is off)")
        ),
    )
    frequency_penalty: float = field(
        default=0.0,
        metadata=declared(
            RealNumber(lambda x: -2 <= x <= 2, "a number in -2..2 (0 is off)")
        ),
    )
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, hash=False, metadata=declared()
    )
    allowed_token_ids: Sequence[int] | None = field(default=None, metadata=declared())
    bad_words: Sequence[str] = field(default=(), metadata=declared())
    min_tokens: int = field(default=0, metadata=declared(WholeNumber(0, 2**63 - 1)))
    n: int = field(default=1, metadata=declared(WholeNumber(1, 128), over_http=False))
    skip_special_tokens: bool | None = field(
        default=None,
        metadata=declared(
            TrueOrFalse("True, False or None"),
            flag=Flag(
                "leave special tokens such as <|box_start|> out of answers, or show them (default: as the model needs)"
            ),
        ),
    )
    thinking_budget: int | None = field(
        default=None,
        metadata=declared(
            WholeNumber(0, 2**63 - 1), flag=Flag("most tokens of thinking", "N")
        ),
    )
    # HTTP spells the forms as its clients do.
    json_schema: Mapping[str, Any] | type | str | None = field(
        default=None,
        hash=False,
        metadata=declared(
            flag=Flag(
                "answers are JSON that follows this schema; --columns may name the fields of its object",
                "FILE",
            ),
            over_http=False,
        ),
    )
    regex: str | None = field(
        default=None,
        metadata=declared(
            flag=Flag("answers match a regular expression", "PATTERN"), over_http=False
        ),
    )
    grammar: str | None = field(default=None, metadata=declared(over_http=False))
    choice: Sequence[str] | None = field(
        default=None,
        metadata=declared(
            flag=Flag("answers are one of these texts", "TEXT", is_repeated=True),
            over_http=False,
        ),
    )

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        self._check_numbers(put)
        self._check_ends(put)
        put("logits_processors", as_tuple("logits_processors", self.logits_processors))
        if not all(map(callable, self.logits_processors)):
            raise InvalidParameters(
                "logits_processors must be callables (tokens, logits) -> logits"
            )
        self._check_token_rules(put)
        self._check_form(put)
        self._check_lengths()

    def _check_numbers(self, put: Callable[[str, Any], None]) -> None:
        for one in SAMPLING_PARAMETERS:
            value = getattr(self, one.name)
            is_unset = value is None and one.default is None
            if one.check is not None and not is_unset:
                put(one.name, one.check.checked(one.name, value))

    def _check_ends(self, put: Callable[[str, Any], None]) -> None:
        is_one = isinstance(self.stop, str)
        stop = (self.stop,) if is_one else as_tuple("stop", self.stop)
        are_texts = all(map(is_non_empty, stop))
        demand(are_texts, InvalidParameters, "stop", stop, "non-empty strings")
        if _is_too_much(stop, _MOST_STOPS):
            raise InvalidParameters(
                f"stop has {len(stop):,} strings; at most {_MOST_STOPS:,} of {_MOST_STOP_CHARACTERS:,} characters together"
                " are looked for"
            )
        put("stop", stop)
        tokens = as_tuple("stop_token_ids", self.stop_token_ids)
        if len(tokens) > _MOST_STOP_TOKENS:
            raise InvalidParameters(
                f"stop_token_ids has {len(tokens):,} ids; at most {_MOST_STOP_TOKENS:,} are looked for"
            )
        right = "token ids of at least 0"
        demand(are_tokens(tokens), InvalidParameters, "stop_token_ids", tokens, right)
        put("stop_token_ids", tuple(map(int, tokens)))
        ends, skip = self.ignore_eos, self.skip_special_tokens
        right = "True or False"
        demand(is_flag(ends), InvalidParameters, "ignore_eos", ends, right)
        demand(
            skip is None or is_flag(skip),
            InvalidParameters,
            "skip_special_tokens",
            skip,
            "True, False or None",
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

    def _check_token_rules(self, put: Callable[[str, Any], None]) -> None:
        self._check_bias(put)
        if self.allowed_token_ids is not None:
            allowed = as_tuple("allowed_token_ids", self.allowed_token_ids)
            _check_count("allowed_token_ids", allowed)
            is_right = bool(allowed) and are_tokens(allowed)
            right = "token ids, or None for all"
            demand(is_right, InvalidParameters, "allowed_token_ids", allowed, right)
            put("allowed_token_ids", tuple(map(int, allowed)))
        self._check_ngrams(put)
        put("bad_words", non_empty_texts("bad_words", self.bad_words))
        if _is_too_much(self.bad_words, _MOST_WORDS):
            raise InvalidParameters(
                f"bad_words has {len(self.bad_words):,} texts; at most {_MOST_WORDS:,} of {_MOST_STOP_CHARACTERS:,} characters "
                "together are looked for"
            )

    def _check_bias(self, put: Callable[[str, Any], None]) -> None:
        bias = {} if self.logit_bias is None else self.logit_bias
        demand(
            isinstance(bias, Mapping) and _is_bias(bias),
            InvalidParameters,
            "logit_bias",
            bias,
            "a mapping of token ids to numbers in -100..100",
        )
        if len(bias) > _MOST_BIASED:
            raise InvalidParameters(
                f"logit_bias has {len(bias):,} tokens; {_MOST_BIASED:,} may have one"
            )
        put("logit_bias", {int(token): float(value) for token, value in bias.items()})

    def _check_ngrams(self, put: Callable[[str, Any], None]) -> None:
        white = as_tuple("whitelist_token_ids", self.whitelist_token_ids)
        _check_count("whitelist_token_ids", white)
        is_right = are_tokens(white) and max(white, default=0) <= MOST
        right = "token ids of at least 0"
        demand(is_right, InvalidParameters, "whitelist_token_ids", white, right)
        put("whitelist_token_ids", tuple(map(int, white)))
        size, window = self.no_repeat_ngram_size, self.window_size
        if size and window is not None and window < size:
            raise InvalidParameters(
                f"window_size is {window}, below no_repeat_ngram_size, which is {size}: nothing would be found in it"
            )
        if size:
            return
        for name in ("window_size", "whitelist_token_ids"):
            if getattr(self, name):
                raise InvalidParameters(
                    f"{name} belongs to no_repeat_ngram_size, which is 0 (off)"
                )

    def _check_form(self, put: Callable[[str, Any], None]) -> None:
        if self.choice is not None:
            put("choice", non_empty_texts("choice", self.choice))
            if not self.choice:
                raise InvalidParameters(
                    "choice is empty; it must be texts to choose from, or None"
                )
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            is_right = value is None or is_non_empty(value)
            right = "non-empty text, or None"
            demand(is_right, InvalidParameters, name, value, right)
        if self.json_schema is not None:
            put("json_schema", json_schema_of(self.json_schema))
        self._check_unicode()
        forms = [name for name in FORMS if getattr(self, name) is not None]
        if len(forms) > 1:
            raise InvalidParameters(
                f"{' and '.join(forms)} exclude each other: an answer has one form"
            )
        names = ("stop", "stop_token_ids", "ignore_eos")
        ends = [name for name in names if getattr(self, name)]
        if forms and ends:
            raise InvalidParameters(
                f"{ends[0]} would end the answer elsewhere than {forms[0]} does; leave it out"
            )

    def _check_unicode(self) -> None:
        if self.json_schema is not None:
            schema = json.dumps(self.json_schema, ensure_ascii=False)
            check_unicode("json_schema", (schema,))
        for name in ("stop", "bad_words", "choice"):
            check_unicode(name, getattr(self, name) or ())
        for name in ("regex", "grammar"):
            check_unicode(name, (getattr(self, name) or "",))

    @property
    def form(self) -> str | None:
        """Name of the parameter that constrains the form, or None."""
        return next((name for name in FORMS if getattr(self, name) is not None), None)


#: The parameters as they are declared, in the order of their fields.
SAMPLING_PARAMETERS = parameters_of(SamplingParams)
#: ``Video.num_frames`` that takes all of them.
ALL_FRAMES = -1


@dataclass(frozen=True)
class Video:
    """A video and the choice of its frames.

    Args:
        source: a file (path, URL, data URI, bytes), pictures of one size, or an array (T, H, W, 3) of uint8.
        fps: frames a second to sample from a file; the rate of given frames, which are all used. None: the family's
            setting.
        num_frames: frames to take evenly, instead of ``fps``; -1 takes all. Excludes ``max_frames``.
        max_frames: most frames, taken evenly if there are more.
        max_pixels: most pixels of a frame; larger ones are scaled down.
        sound: hear the file's sound, as a recording behind the video.

    Raises:
        InvalidParameters: a value is out of range.
    """

    source: Any
    _: KW_ONLY
    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None
    sound: bool = False

    def __post_init__(self) -> None:
        fps, sound = self.fps, self.sound
        is_said = isinstance(sound, bool)
        demand(is_said, InvalidParameters, "sound", sound, "True or False")
        if fps is not None:
            is_right = is_real(fps) and fps > 0
            right = "a finite number above 0"
            demand(is_right, InvalidParameters, "fps", fps, right)
        for name in ("num_frames", "max_frames", "max_pixels"):
            value = getattr(self, name)
            if value is None:
                continue
            if name == "num_frames" and is_whole(value) and value == ALL_FRAMES:
                continue
            _check_least(name, value, 1)
        if self.num_frames is not None and self.max_frames is not None:
            raise InvalidParameters("num_frames and max_frames exclude each other")


@dataclass(frozen=True)
class Audio:
    """A recording.

    Args:
        source: a wav, flac, mp3, ogg, aiff, caf or aac file (path, URL, data URI, bytes), an mp4, mov, mkv, webm or avi
            file with sound, or an array (samples,) or (samples, channels) of floats in -1..1, int16, int32 or uint8.
        rate: samples a second, for an array only, which needs it.

    Raises:
        InvalidParameters: the rate is out of range.
    """

    source: Any
    _: KW_ONLY
    rate: int | None = None

    def __post_init__(self) -> None:
        rate = self.rate
        if rate is None:
            return
        is_right = is_whole(rate) and 1_000 <= rate <= 768_000
        right = "an integer in 1,000..768,000"
        demand(is_right, InvalidParameters, "rate", rate, right)


#: Most seconds for reading a source: a day. Clocks and locks take no much larger number.
MAX_SECONDS = 86_400


@dataclass(frozen=True, kw_only=True)
class FetchPolicy:
    """Rules for reading media by path or URL.

    Addresses are checked as they resolve here; a proxy from the environment resolves names itself.

    Args:
        allow_http: read http and https URLs.
        allow_private: also from loopback, private, link-local and other non-public addresses.
        allow_files: read local paths.
        directories: if any, only paths below these, with links resolved.
        max_bytes: most bytes of a URL, a data URI, or a file of a picture or recording.
        seconds: most seconds for one source.
        max_redirects: most redirects of a URL.

    Raises:
        InvalidParameters: a value is out of range.
    """

    allow_http: bool = True
    allow_private: bool = False
    allow_files: bool = True
    directories: Sequence[str | Path] = ()
    max_bytes: int = 256 << 20
    seconds: float = 60.0
    max_redirects: int = 5

    def __post_init__(self) -> None:
        for name in ("allow_http", "allow_private", "allow_files"):
            value = getattr(self, name)
            is_said = isinstance(value, bool)
            demand(is_said, InvalidParameters, name, value, "True or False")
        _check_least("max_bytes", self.max_bytes, 1)
        _check_least("max_redirects", self.max_redirects, 0)
        demand(
            is_real(self.seconds) and 0 < self.seconds <= MAX_SECONDS,
            InvalidParameters,
            "seconds",
            self.seconds,
            f"a number above 0, {MAX_SECONDS:,} at most",
        )
        object.__setattr__(self, "directories", _paths(self.directories))


@dataclass(frozen=True, kw_only=True)
class Template:
    """Arguments for the model's chat template. An unread one is refused.

    Args:
        tools: functions for the model to call, in OpenAI's form.
        documents: mappings, as the template reads them.
        enable_thinking: None leaves it to the template.
        reasoning_effort: amount of thinking, in the template's words.
        args: other arguments, by name.
        add_generation_prompt: begin the assistant's turn.
        continue_final_message: continue the last turn.
        escape_special_tokens: read special tokens in the chat (``<|im_end|>``) as plain text. Else those of turns and
            pictures are refused.

    Raises:
        InvalidPrompt: a value has another type, or an argument is given twice.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    escape_special_tokens: bool = False

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        for name in ("tools", "documents"):
            value = getattr(self, name)
            if value is not None:
                put(name, _mappings(name, value))
        thinking, effort = self.enable_thinking, self.reasoning_effort
        demand(
            thinking is None or isinstance(thinking, bool),
            InvalidPrompt,
            "enable_thinking",
            thinking,
            "True, False or None",
        )
        demand(
            effort is None or isinstance(effort, str),
            InvalidPrompt,
            "reasoning_effort",
            effort,
            "text, or None",
        )
        args, right = self.args, "a mapping of names to values"
        is_mapping = isinstance(args, Mapping) and _are_texts(args)
        demand(is_mapping, InvalidPrompt, "args", args, right)
        put("args", dict(args))
        twice = sorted(self.args.keys() & self._by_name.keys())
        if twice:
            raise InvalidPrompt(f"{twice[0]} is given twice: by itself and in args")
        for name in (
            "add_generation_prompt",
            "continue_final_message",
            "escape_special_tokens",
        ):
            value = getattr(self, name)
            demand(is_flag(value), InvalidPrompt, name, value, "True or False")

    @property
    def _by_name(self) -> dict[str, Any]:
        """Arguments that are fields, but None."""
        values = {name: getattr(self, name) for name in _NAMED}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments, by the template's names."""
        return {**self.args, **self._by_name}

    @property
    def said(self) -> list[str]:
        """Names of arguments that differ from the defaults."""
        said = sorted(self.arguments)
        if not self.add_generation_prompt and not self.continue_final_message:
            said.append("add_generation_prompt=False")
        if self.continue_final_message:
            said.append("continue_final_message")
        return said


#: Arguments of chat templates that are fields of ``Template``.
_NAMED = ("tools", "documents", "enable_thinking", "reasoning_effort")
PLAIN_TEMPLATE = Template()
#: Largest absolute value of a priority.
MAX_PRIORITY = 1_000_000


#: Values of ``Request.draft``.
DRAFTS = ("auto", "off")


#: Names that others have for what a request holds.
OF_REQUESTS = {
    **MEDIA,
    **PROMPTS,
    **of_params(SAMPLING, frozenset(one.name for one in fields(SamplingParams))),
}


@advises_of_fields(OF_REQUESTS)
@dataclass(frozen=True, kw_only=True)
class Request:
    """One request: exactly one of ``prompt``, ``messages``, ``token_ids`` or ``inputs``, with media.

    Args:
        prompt: a single user turn.
        messages: a chat in OpenAI's form (``{"role": ..., "content": str | [parts]}``). Media are parts, or in order in
            ``images``, ``videos`` and ``audios``.
        token_ids: final tokens, with placeholders for media.
        inputs: output of ``mlx_vlm.utils.prepare_inputs``: ``input_ids`` (1, L), ``pixel_values``, ...
        images: one or several: path, URL, data URI, bytes, PIL image or array.
        videos: one or several: path, URL, data URI, bytes, array (T, H, W, 3) or ``Video``.
        audios: one or several: path, URL, data URI, bytes or ``Audio``.
        template: a ``Template``, or a mapping of its fields. None: ``prompt`` is final text with placeholders.
        min_pixels: fewest pixels of a picture, if the family's processor has such bounds.
        max_pixels: most pixels, likewise; no more than the model's own, unless ``min_pixels`` is above those.
            ``Result.model_image_sizes`` has the sizes.
        options: texts, or lists of token ids, that may follow the prompt. ``Result.options`` has the log-probability of
            each, and there is no answer (docs/evaluations.md). Of ``params`` only ``prompt_logprobs`` goes with them.
        params: ``SamplingParams``, or a mapping of its fields.
        request_id: unique name; by default a new one.
        priority: higher goes first, among one client's requests.
        client: number of the client. Clients share places evenly, whatever the priorities; those with negative
            numbers get the places that no other wants.
        cache: state of a conversation that the prompt continues; only new tokens are prefilled.
        return_cache: return prompt's and answer's state in ``Result.cache``.
        return_prompt_ids: return the prompt's tokens in ``Result.prompt_token_ids``.
        cache_salt: what the request leaves in the prefix cache is reused by requests with the same text here, alone.
        draft: "auto" computes probable next tokens together where that is faster; "off" does not. Answers are the same
            (docs/speculation.md).

    Raises:
        InvalidRequest: a value is out of range.
    """

    prompt: str | None = None
    messages: Sequence[Message] | None = None
    token_ids: Sequence[int] | np.ndarray | None = None
    inputs: Mapping[str, Any] | None = None
    images: ImageInput | Sequence[ImageInput] = ()
    videos: VideoInput | Sequence[VideoInput] = ()
    audios: AudioInput | Sequence[AudioInput] = ()
    template: Template | None = PLAIN_TEMPLATE
    min_pixels: int | None = None
    max_pixels: int | None = None
    options: Sequence[Option] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    priority: int = 0
    client: int = 0
    cache: PromptCache | None = None
    return_cache: bool = False
    draft: str = "auto"
    return_prompt_ids: bool = False
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        right = f"one of {', '.join(DRAFTS)}"
        demand(self.draft in DRAFTS, InvalidRequest, "draft", self.draft, right)
        for name in ("images", "videos", "audios"):
            put(name, _several(getattr(self, name)))
        put("params", params_of(self.params))
        put("options", checked_options(self.options))
        if self.options:
            self._check_scored()
        if self.template is not None:
            put(
                "template",
                record_of(Template, "template", self.template, InvalidPrompt),
            )
        self._check_order(put)
        set_pixel_bounds(self, self.min_pixels, self.max_pixels)
        keeps = self.return_cache
        demand(is_flag(keeps), InvalidRequest, "return_cache", keeps, "True or False")
        continues = self.cache is not None or keeps
        if continues and self.params.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs need every token prefilled; leave cache and return_cache out"
            )

    def _check_scored(self) -> None:
        """Refuse what does not go with options."""
        if self.return_cache:
            raise InvalidRequest(
                "options have no answer whose state return_cache could keep; leave it out"
            )
        asked = SamplingParams(prompt_logprobs=self.params.prompt_logprobs)
        if self.params != asked:
            raise InvalidParameters(
                "options are scored, not sampled: leave params out, but for prompt_logprobs"
            )

    def _check_order(self, put: Callable[[str, Any], None]) -> None:
        """Check what says whose the request is and when it comes."""
        priority, client = self.priority, self.client
        salt, called = self.cache_salt, self.request_id
        is_right = is_whole(priority) and abs(priority) <= MAX_PRIORITY
        right = f"an integer in -{MAX_PRIORITY}..{MAX_PRIORITY}"
        demand(is_right, InvalidRequest, "priority", priority, right)
        put("priority", int(priority))
        is_right = salt is None or is_non_empty(salt)
        right = "text, not empty, or None"
        demand(is_right, InvalidRequest, "cache_salt", salt, right)
        demand(is_whole(client), InvalidRequest, "client", client, "an integer")
        put("client", int(client))
        if called is not None:
            is_right = is_non_empty(called) and "\0" not in called
            right = "text, not empty and without null characters, or None"
            demand(is_right, InvalidRequest, "request_id", called, right)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one step: the chosen token's, and the most likely ones' in falling order."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Usage:
    """Token counts of a request.

    Attributes:
        prompt_tokens: positions of the prompt, media included.
        image_tokens: prompt positions of pictures, videos or recordings.
        cached_tokens: prompt positions taken from a cache.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    image_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds of a request's life; prefill and decode share the device.

    Attributes:
        queue: waiting for a place, without ``encode``.
        encode: encoding its media.
        prefill: from its place to its first token.
        decode: from then to its end.
        ttft: from submit to its first token, or to the end of an answer that has none.
        total: from submit to its end.
        read: within ``queue``, reading files and URLs.
        process: within ``queue``, decoding media and running the processor.
    """

    queue: float = 0.0
    encode: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    ttft: float = math.nan
    total: float = 0.0
    read: float = 0.0
    process: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """A request's end and answer.

    Attributes:
        stop_reason: the stop string or token id that matched.
        image_sizes: (width, height) of the pictures as read.
        model_image_sizes: the same after the processor, for families with a patch grid.
        video_sizes: (frames, width, height) for the processor.
        audio_seconds: lengths of the recordings.
        prompt_logprobs: of each prompt position; None for the first, for media, and for tokens that the model sees
            before predicting them.
        prompt_token_ids: with ``return_prompt_ids``: the prompt as the model reads it, media as placeholders.
        parsed: an answer with a form: the value of its JSON, or its text. None if incomplete.
        others: further answers (``n``), each with its own end and usage.
        options: what the model says of each of ``Request.options``, in their order.
        error: set if and only if ``finish_reason`` is "error".
        cache: the conversation's state, with ``return_cache``.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason = "stop"
    stop_reason: str | int | None = None
    usage: Usage = Usage()
    timings: Timings = Timings()
    image_sizes: tuple[tuple[int, int], ...] = ()
    model_image_sizes: tuple[tuple[int, int], ...] = ()
    video_sizes: tuple[tuple[int, int, int], ...] = ()
    audio_seconds: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    parsed: Any = None
    others: tuple[Result, ...] = ()
    options: tuple[OptionScore, ...] = ()
    error: str | None = None
    if TYPE_CHECKING:
        exception: BaseException | None = None
        cache: PromptCache | None = None
    else:
        # objects, not data: set like the others, and left out by dataclasses.asdict, which goes to JSON
        exception: InitVar[BaseException | None] = None
        cache: InitVar[PromptCache | None] = None

        def __post_init__(
            self, exception: BaseException | None, cache: PromptCache | None
        ) -> None:
            object.__setattr__(self, "exception", exception)
            object.__setattr__(self, "cache", cache)

    @property
    def ok(self) -> bool:
        """Whether the answer ended by a stop or its length."""
        return self.finish_reason in ("stop", "length")

    def raise_for_error(self) -> Result:
        """Return self, or raise RequestFailed."""
        if self.error is not None:
            raise RequestFailed(
                f"request {self.request_id}: {self.error}"
            ) from self.exception
        return self


def failed_result(request_id: str, error: BaseException) -> Result:
    """Return a failed request's result."""
    return Result(
        request_id=request_id,
        finish_reason="error",
        error=describe(error),
        exception=let_go(error),
    )


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a request: a token and the text that it completes, an end, or both.

    Attributes:
        result: set on the request's last event.
        index: number of the answer.
        answer: set at the end of that answer.
        prompt_tokens: length of the prompt; of events with a token that ends nothing.
        prompt_token_ids: likewise its tokens, with ``Request.return_prompt_ids``.
    """

    request_id: str
    token: int | None = None
    text: str = ""
    logprobs: TokenLogprobs | None = None
    result: Result | None = None
    index: int = 0
    answer: Result | None = None
    prompt_tokens: int = 0
    prompt_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Stats:
    """Counters of a batcher: present ones, and totals since its start."""

    queued: int
    waiting: int
    prefilling: int
    decoding: int
    kv_bytes: int
    finished: int
    failed: int
    cancelled: int
    generated_tokens: int
    tokens_per_second: float = 0.0  # generated, over the last five seconds of work
    cache_hits: int = 0  # requests that reused a prefix
    cached_tokens: int = 0  # prompt positions that they reused
    cache_bytes: int = 0  # kept for later requests
    # of the engine: if it does not grow while requests run, the engine hangs
    steps: int = 0
    # requests recomputed after a failed step or a lack of memory; no token is told twice
    recomputed: int = 0
    input_bytes: int = 0  # processors' outputs of live requests, on the host
    max_kv_bytes: int | None = None  # bound on kv_bytes
    # all of MLX's memory in this process: weights, and everything here but input_bytes
    mlx_bytes: int = 0
    stalled: float = 0.0  # seconds in a step that does not end; 0 while steps go on
    ahead_bytes: int = 0  # read and prepared for requests that wait
    most_rows: int = 0  # requests that may have a place now; varies with max_rows=None
    # with requests to compute; waiting for their media to be read does not count
    busy_seconds: float = 0.0
    drafted: int = 0  # tokens computed as drafts
    drafts_held: int = 0  # accepted drafts: each saved its request a step


def params_of(given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    if given is None:
        return SamplingParams()
    return record_of(SamplingParams, "params", given, InvalidParameters)


def record_of(
    kind: type[Kind], name: str, given: Any, error: type[InvalidRequest]
) -> Kind:
    """Return a record from itself or a mapping of fields. Raises ``error`` for anything else."""
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise error(
            f"{name} is {shown(given)}; it must be a {kind.__name__} or a mapping of its fields"
        )
    names = {field.name for field in fields(kind)}
    strange = sorted(str(one) for one in given if one not in names)
    if strange:
        instead = SAMPLING if kind is SamplingParams else {}
        likely = meant(strange[0], names, instead)
        raise error(
            f"{name} has no {', '.join(strange)}{likely}; it has {', '.join(sorted(names))}"
        )
    return kind(**given)
