"""Types that users meet: requests, parameters, events, results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from io import IOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np

from vlm_batch.checks import (
    MOST,
    as_tuple,
    check_unicode,
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
_WHOLE_PARAMETERS = (
    ("max_tokens", 0, 2**63 - 1),
    ("top_k", 0, MOST),
    ("repetition_context_size", 1, MOST),
    ("seed", 0, 2**64 - 1),
    ("logprobs", 0, 100),
    ("prompt_logprobs", 0, 100),
    ("min_tokens", 0, 2**63 - 1),
    ("n", 1, 128),
    ("thinking_budget", 0, 2**63 - 1),
    ("no_repeat_ngram_size", 0, MOST),
    ("window_size", 1, MOST),
)
_MAY_BE_NONE = ("seed", "logprobs", "prompt_logprobs", "thinking_budget", "window_size")
#: Bounds within which logits of float32 or less do not overflow.
_REAL_PARAMETERS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "temperature",
        lambda x: x == 0 or 1e-6 <= x <= 1e6,
        "0 (greedy) or a number in 1e-6..1e6",
    ),
    (
        "top_p",
        lambda x: 1e-30 <= x <= 1,
        "a number above 0 (1e-30) and at most 1 (1 is off)",
    ),
    ("min_p", lambda x: 0 <= x < 1, "a number of at least 0 and below 1 (0 is off)"),
    (
        "repetition_penalty",
        lambda x: 1e-3 <= x <= 1e3,
        "a number in 0.001..1000 (1 is off)",
    ),
    ("presence_penalty", lambda x: -2 <= x <= 2, "a number in -2..2 (0 is off)"),
    ("frequency_penalty", lambda x: -2 <= x <= 2, "a number in -2..2 (0 is off)"),
)


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
        no_repeat_ngram_size: no sequence of this many tokens occurs twice in the answer; 0 is off. OCR models that fall
            into loops need it: DeepSeek-OCR's authors take 30, with a window of 90.
        window_size: number of the answer's last tokens in which such a sequence is looked for; None: the whole answer.
        whitelist_token_ids: tokens that may complete such a sequence all the same, such as ``<td>`` and ``</td>``.
        min_tokens: fewest tokens of the answer; stop strings do not count before.
        n: number of answers, with the seeds ``seed``, ``seed + 1``, ...
        thinking_budget: most tokens of thinking; None sets no bound.
        skip_special_tokens: leave special tokens such as ``<|box_start|>`` out of the text. False shows all but the one
            that ends the answer. None: out, but for checkpoints that answer in such tokens
            (``ModelSpec.special_tokens``).
        json_schema: a mapping, JSON text or a pydantic model's class.
        regex: regular expression of the whole answer.
        grammar: Lark grammar, as llguidance reads it.
        choice: texts to choose from.

    Raises:
        InvalidParameters: a value is out of range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    no_repeat_ngram_size: int = 0
    window_size: int | None = None
    whitelist_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    n: int = 1
    thinking_budget: int | None = None
    skip_special_tokens: bool | None = None
    json_schema: Mapping[str, Any] | type | str | None = field(default=None, hash=False)
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        put(
            "stop",
            (self.stop,) if isinstance(self.stop, str) else as_tuple("stop", self.stop),
        )
        put("stop_token_ids", as_tuple("stop_token_ids", self.stop_token_ids))
        put("logits_processors", as_tuple("logits_processors", self.logits_processors))
        for name, least, most in _WHOLE_PARAMETERS:
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if not (is_whole(value) and least <= value <= most):
                raise InvalidParameters(
                    f"{name} is {shown(value)}; it must be an integer in {least}..{most}"
                )
            put(name, int(value))
        for name, is_right, right in _REAL_PARAMETERS:
            value = getattr(self, name)
            if not (is_real(value) and is_right(float(value))):
                raise InvalidParameters(f"{name} is {shown(value)}; it must be {right}")
            put(name, float(value))
        if not all(isinstance(stop, str) and stop for stop in self.stop):
            raise InvalidParameters(
                f"stop is {shown(self.stop)}; it must be non-empty strings"
            )
        if (
            len(self.stop) > _MOST_STOPS
            or sum(map(len, self.stop)) > _MOST_STOP_CHARACTERS
        ):
            raise InvalidParameters(
                f"stop has {len(self.stop):,} strings; at most {_MOST_STOPS:,} of {_MOST_STOP_CHARACTERS:,} characters together"
                " are looked for"
            )
        if len(self.stop_token_ids) > _MOST_STOP_TOKENS:
            raise InvalidParameters(
                f"stop_token_ids has {len(self.stop_token_ids):,} ids; at most {_MOST_STOP_TOKENS:,} are looked for"
            )
        if not all(is_whole(token) and token >= 0 for token in self.stop_token_ids):
            raise InvalidParameters(
                f"stop_token_ids is {shown(self.stop_token_ids)}; it must be token ids of at least 0"
            )
        put("stop_token_ids", tuple(map(int, self.stop_token_ids)))
        if not all(map(callable, self.logits_processors)):
            raise InvalidParameters(
                "logits_processors must be callables (tokens, logits) -> logits"
            )
        if not isinstance(self.ignore_eos, (bool, np.bool_)):
            raise InvalidParameters(
                f"ignore_eos is {shown(self.ignore_eos)}; it must be True or False"
            )
        if not (
            self.skip_special_tokens is None
            or isinstance(self.skip_special_tokens, (bool, np.bool_))
        ):
            said = shown(self.skip_special_tokens)
            raise InvalidParameters(
                f"skip_special_tokens is {said}; it must be True, False or None"
            )

        self._check_token_rules(put)
        self._check_form(put)
        self._check_lengths()

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
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping) or not all(
            is_whole(token) and token >= 0 and is_real(value) and -100 <= value <= 100
            for token, value in bias.items()
        ):
            raise InvalidParameters(
                f"logit_bias is {shown(bias)}; it must be a mapping of token ids to numbers in -100..100"
            )
        if len(bias) > _MOST_BIASED:
            raise InvalidParameters(
                f"logit_bias has {len(bias):,} tokens; {_MOST_BIASED:,} may have one"
            )
        put("logit_bias", {int(token): float(value) for token, value in bias.items()})
        if self.allowed_token_ids is not None:
            allowed = as_tuple("allowed_token_ids", self.allowed_token_ids)
            if len(allowed) > _MOST_ALLOWED:
                raise InvalidParameters(
                    f"allowed_token_ids has {len(allowed):,} ids; {_MOST_ALLOWED:,} are the most"
                )
            if not allowed or not all(
                is_whole(token) and token >= 0 for token in allowed
            ):
                raise InvalidParameters(
                    f"allowed_token_ids is {shown(allowed)}; it must be token ids, or None for all"
                )
            put("allowed_token_ids", tuple(map(int, allowed)))
        self._check_ngrams(put)
        put("bad_words", non_empty_texts("bad_words", self.bad_words))
        if (
            len(self.bad_words) > _MOST_WORDS
            or sum(map(len, self.bad_words)) > _MOST_STOP_CHARACTERS
        ):
            raise InvalidParameters(
                f"bad_words has {len(self.bad_words):,} texts; at most {_MOST_WORDS:,} of {_MOST_STOP_CHARACTERS:,} characters "
                "together are looked for"
            )

    def _check_ngrams(self, put: Callable[[str, Any], None]) -> None:
        white = as_tuple("whitelist_token_ids", self.whitelist_token_ids)
        if len(white) > _MOST_ALLOWED:
            raise InvalidParameters(
                f"whitelist_token_ids has {len(white):,} ids; {_MOST_ALLOWED:,} are the most"
            )
        if not all(is_whole(token) and 0 <= token <= MOST for token in white):
            raise InvalidParameters(
                f"whitelist_token_ids is {shown(white)}; it must be token ids of at least 0"
            )
        put("whitelist_token_ids", tuple(map(int, white)))
        if self.no_repeat_ngram_size:
            if (
                self.window_size is not None
                and self.window_size < self.no_repeat_ngram_size
            ):
                raise InvalidParameters(
                    f"window_size is {self.window_size}, below no_repeat_ngram_size, which is "
                    f"{self.no_repeat_ngram_size}: nothing would be found in it"
                )
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
            if value is not None and not (isinstance(value, str) and value):
                raise InvalidParameters(
                    f"{name} is {shown(value)}; it must be non-empty text, or None"
                )
        if self.json_schema is not None:
            put("json_schema", json_schema_of(self.json_schema))
            check_unicode(
                "json_schema", (json.dumps(self.json_schema, ensure_ascii=False),)
            )
        for name in ("stop", "bad_words", "choice"):
            check_unicode(name, getattr(self, name) or ())
        for name in ("regex", "grammar"):
            check_unicode(name, (getattr(self, name) or "",))
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidParameters(
                f"{' and '.join(given)} exclude each other: an answer has one form"
            )
        ends = [
            name
            for name in ("stop", "stop_token_ids", "ignore_eos")
            if getattr(self, name)
        ]
        if given and ends:
            raise InvalidParameters(
                f"{ends[0]} would end the answer elsewhere than {given[0]} does; leave it out"
            )

    @property
    def form(self) -> str | None:
        """Name of the parameter that constrains the form, or None."""
        return next((name for name in FORMS if getattr(self, name) is not None), None)


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
        if not isinstance(self.sound, bool):
            raise InvalidParameters(
                f"sound is {shown(self.sound)}; it must be True or False"
            )
        fps = self.fps
        if fps is not None and not (is_real(fps) and fps > 0):
            raise InvalidParameters(
                f"fps is {shown(fps)}; it must be a finite number above 0"
            )
        for name in ("num_frames", "max_frames", "max_pixels"):
            value = getattr(self, name)
            if value is None or (is_whole(value) and value >= 1):
                continue
            if name == "num_frames" and is_whole(value) and value == ALL_FRAMES:
                continue
            raise InvalidParameters(
                f"{name} is {shown(value)}; it must be an integer of at least 1"
            )
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
        if self.rate is not None and not (
            is_whole(self.rate) and 1_000 <= self.rate <= 768_000
        ):
            raise InvalidParameters(
                f"rate is {shown(self.rate)}; it must be an integer in 1,000..768,000"
            )


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
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidParameters(
                    f"{name} is {shown(value)}; it must be True or False"
                )
        for name, least in (("max_bytes", 1), ("max_redirects", 0)):
            if not (is_whole(value := getattr(self, name)) and value >= least):
                raise InvalidParameters(
                    f"{name} is {shown(value)}; it must be an integer of at least {least}"
                )
        if not (is_real(self.seconds) and 0 < self.seconds <= MAX_SECONDS):
            raise InvalidParameters(
                f"seconds is {shown(self.seconds)}; it must be a number above 0, {MAX_SECONDS:,} at most"
            )
        given = self.directories
        directories = (
            (given,)
            if isinstance(given, (str, Path))
            else as_tuple("directories", given)
        )
        if isinstance(given, bytes) or not all(
            isinstance(one, (str, Path)) and str(one) for one in directories
        ):
            raise InvalidParameters(
                f"directories is {shown(given)}; it must be a sequence of paths"
            )
        object.__setattr__(self, "directories", directories)


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
            if value is None:
                continue
            if not isinstance(value, (list, tuple)) or not all(
                isinstance(one, Mapping) for one in value
            ):
                raise InvalidPrompt(
                    f"{name} is {shown(value)}; it must be a list of mappings, or None"
                )
            put(name, [dict(one) for one in value])
        if self.enable_thinking is not None and not isinstance(
            self.enable_thinking, bool
        ):
            raise InvalidPrompt(
                f"enable_thinking is {shown(self.enable_thinking)}; it must be True, False or None"
            )
        if self.reasoning_effort is not None and not isinstance(
            self.reasoning_effort, str
        ):
            raise InvalidPrompt(
                f"reasoning_effort is {shown(self.reasoning_effort)}; it must be text, or None"
            )
        if not isinstance(self.args, Mapping) or not all(
            isinstance(name, str) for name in self.args
        ):
            raise InvalidPrompt(
                f"args is {shown(self.args)}; it must be a mapping of names to values"
            )
        put("args", dict(self.args))
        if twice := sorted(
            name
            for name in self.args.keys() & _NAMED
            if getattr(self, name) is not None
        ):
            raise InvalidPrompt(f"{twice[0]} is given twice: by itself and in args")
        for name in (
            "add_generation_prompt",
            "continue_final_message",
            "escape_special_tokens",
        ):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise InvalidPrompt(
                    f"{name} is {shown(getattr(self, name))}; it must be True or False"
                )

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments, by the template's names."""
        return {
            **self.args,
            **{
                name: value
                for name in _NAMED
                if (value := getattr(self, name)) is not None
            },
        }

    @property
    def said(self) -> list[str]:
        """Names of arguments that differ from the defaults."""
        turn = (
            []
            if self.add_generation_prompt or self.continue_final_message
            else ["add_generation_prompt=False"]
        )
        return (
            sorted(self.arguments)
            + turn
            + ["continue_final_message"] * bool(self.continue_final_message)
        )


#: Arguments of chat templates that are fields of ``Template``.
_NAMED = ("tools", "documents", "enable_thinking", "reasoning_effort")
PLAIN_TEMPLATE = Template()
#: Largest absolute value of a priority.
MAX_PRIORITY = 1_000_000


#: Values of ``Request.draft``.
DRAFTS = ("auto", "off")


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
        params: ``SamplingParams``, or a mapping of its fields.
        request_id: unique name; by default a new one.
        priority: higher goes first, among one client's requests.
        client: number of the client. Clients share places evenly, whatever the priorities.
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
        if self.draft not in DRAFTS:
            raise InvalidRequest(
                f"draft is {shown(self.draft)}; it must be one of {', '.join(DRAFTS)}"
            )
        for name in ("images", "videos", "audios"):
            given: Any = getattr(self, name)
            is_read = isinstance(given, Iterator) and not isinstance(given, IOBase)
            several = (
                given
                if is_read or isinstance(given, (list, tuple))
                else ()
                if given is None
                else (given,)
            )
            object.__setattr__(self, name, tuple(several))
        object.__setattr__(self, "params", params_of(self.params))
        if self.template is not None:
            object.__setattr__(
                self,
                "template",
                record_of(Template, "template", self.template, InvalidPrompt),
            )
        if not (is_whole(self.priority) and abs(self.priority) <= MAX_PRIORITY):
            raise InvalidRequest(
                f"priority is {shown(self.priority)}; it must be an integer in -{MAX_PRIORITY}..{MAX_PRIORITY}"
            )
        object.__setattr__(self, "priority", int(self.priority))
        if not (
            self.cache_salt is None
            or (isinstance(self.cache_salt, str) and self.cache_salt)
        ):
            raise InvalidRequest(
                f"cache_salt is {shown(self.cache_salt)}; it must be text, not empty, or None"
            )
        if not is_whole(self.client):
            raise InvalidRequest(
                f"client is {shown(self.client)}; it must be an integer"
            )
        object.__setattr__(self, "client", int(self.client))
        called = self.request_id
        if called is not None and not (
            isinstance(called, str) and called and "\0" not in called
        ):
            raise InvalidRequest(
                f"request_id is {shown(called)}; it must be text, not empty and without null characters, or None"
            )
        set_pixel_bounds(self, self.min_pixels, self.max_pixels)
        if self.params.prompt_logprobs is not None and (
            self.cache is not None or self.return_cache
        ):
            raise InvalidRequest(
                "prompt_logprobs need every token prefilled; leave cache and return_cache out"
            )
        if not isinstance(self.return_cache, (bool, np.bool_)):
            raise InvalidRequest(
                f"return_cache is {shown(self.return_cache)}; it must be True or False"
            )


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
    return (
        SamplingParams()
        if given is None
        else record_of(SamplingParams, "params", given, InvalidParameters)
    )


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
    known = {field.name for field in fields(kind)}
    unknown = sorted(str(one) for one in given if one not in known)
    if unknown:
        likely = "".join(
            f" ({one!r} is probably meant)"
            for one in get_close_matches(unknown[0], known, 1)
        )
        raise error(
            f"{name} has no {', '.join(unknown)}{likely}; it has {', '.join(sorted(known))}"
        )
    return kind(**given)
