"""The nouns that users meet: a request, its parameters, its events and its result. Data, with its checks, and nothing else."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields
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
    put_pixels,
)
from vlm_batch.errors import InvalidParameters, InvalidPrompt, InvalidRequest, RequestFailed, describe, let_go, shown

if TYPE_CHECKING:
    from vlm_batch.store.prompt import PromptCache

#: ``(tokens so far (T,), logits (1, V)) -> logits (1, V)``, mlx-lm's convention; called on the engine thread.
LogitsProcessor: TypeAlias = Callable[[Any, Any], Any]

#: A path, URL, data URI, ``bytes``, open file, PIL image, or array (H, W), (H, W, 3) or (H, W, 4) of uint8 or floats in 0..1.
ImageInput: TypeAlias = Any

#: A ``Video``, or what its ``source`` can be.
VideoInput: TypeAlias = Any

Message: TypeAlias = Mapping[str, Any]

Kind = TypeVar("Kind", "SamplingParams", "Template")

FinishReason = Literal["stop", "length", "cancelled", "error"]


#: The parameters that hold an answer to a form.
FORMS = ("json_schema", "regex", "grammar", "choice")
#: Every token is looked for among a request's stop tokens, and every text for its stop strings, while others wait.
_MOST_STOPS, _MOST_STOP_CHARACTERS, _MOST_STOP_TOKENS = 1024, 2**20, 2**14
#: Bad words and choices; tokens that may come (more than any vocabulary); tokens with a bias.
_MOST_WORDS, _MOST_ALLOWED, _MOST_BIASED = 1024, 2**20, 2**16
_WHOLE_PARAMETERS = (
    ("max_tokens", 1, 2**63 - 1),
    ("top_k", 0, MOST),
    ("repetition_context_size", 1, MOST),
    ("seed", 0, 2**64 - 1),
    ("logprobs", 0, 100),
    ("prompt_logprobs", 0, 100),
    ("min_tokens", 0, 2**63 - 1),
    ("n", 1, 128),
    ("thinking_budget", 0, 2**63 - 1),
)
_MAY_BE_NONE = ("seed", "logprobs", "prompt_logprobs", "thinking_budget")
#: Logits are divided by the temperature, and by or with the penalty, in float32 or less: what overflows there is refused.
_REAL_PARAMETERS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda x: x == 0 or 1e-6 <= x <= 1e6, "0 (greedy) or a number in 1e-6..1e6"),
    ("top_p", lambda x: 1e-30 <= x <= 1, "a number above 0 (1e-30) and at most 1 (1 is off)"),
    ("min_p", lambda x: 0 <= x < 1, "a number of at least 0 and below 1 (0 is off)"),
    ("repetition_penalty", lambda x: 1e-3 <= x <= 1e3, "a number in 0.001..1000 (1 is off)"),
    ("presence_penalty", lambda x: -2 <= x <= 2, "a number in -2..2 (0 is off)"),
    ("frequency_penalty", lambda x: -2 <= x <= 2, "a number in -2..2 (0 is off)"),
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters for choosing the tokens of one request. Numbers of numpy are taken as Python's.

    Args:
        max_tokens: tokens of the answer at most.
        temperature: 0 is greedy; the logits are divided by it.
        top_p: keep the most likely tokens until their probabilities reach this; 1 is off.
        top_k: keep so many of the most likely tokens; 0 is off.
        min_p: drop tokens less likely than this times the most likely one; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of recent tokens (Keskar et al. 2019); 1 is off.
        repetition_context_size: how many tokens count as recent.
        seed: makes a sampled request reproducible whatever shares its batch. None draws a fresh seed.
        stop: strings that end the answer and are not part of it.
        stop_token_ids: tokens that end it, beside the model's own end tokens.
        ignore_eos: do not end at the model's own end tokens.
        logprobs: report at each step the log-probabilities of the chosen token and of so many most likely tokens, taken after
            the processors and before the temperature.
        prompt_logprobs: report the same of each of the prompt's own tokens, as the model has them. Such a request takes
            nothing from earlier ones.
        logits_processors: functions ``(tokens, logits) -> logits``, mlx-lm's convention, with all tokens so far (prompt and
            answer, shape (T,)) and logits of shape (1, V).
        presence_penalty: subtracted from the logits of tokens that the answer has (OpenAI's definition).
        frequency_penalty: subtracted as often as the answer has the token (OpenAI's definition).
        logit_bias: numbers in -100..100 that are added to tokens' logits.
        allowed_token_ids: exclude all other tokens; None allows all.
        bad_words: texts that do not come in the answer, spelled as the tokenizer spells them, with or without a space before.
        min_tokens: how many tokens come before any end: end tokens do not, and stop strings do not count.
        n: how many answers are sampled from one prompt, with the seeds ``seed``, ``seed + 1``, ...
        thinking_budget: tokens after which the model's thinking is ended.
        json_schema: a form of the answer: a schema as a mapping, as JSON text, or as a pydantic model's class.
        regex: a form: a regular expression of the whole answer.
        grammar: a form: a grammar in Lark's notation, as llguidance reads it.
        choice: a form: texts to choose from.

    An answer has one form at most. It begins after thinking, if the model thinks. The answer then has that form, or ends with
    "length".

    Raises InvalidParameters for a value out of range.
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
    min_tokens: int = 0
    n: int = 1
    thinking_budget: int | None = None
    json_schema: Mapping[str, Any] | type | str | None = field(default=None, hash=False)
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        put("stop", (self.stop,) if isinstance(self.stop, str) else as_tuple("stop", self.stop))
        put("stop_token_ids", as_tuple("stop_token_ids", self.stop_token_ids))
        put("logits_processors", as_tuple("logits_processors", self.logits_processors))
        for name, least, most in _WHOLE_PARAMETERS:
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if not (is_whole(value) and least <= value <= most):
                raise InvalidParameters(f"{name} is {shown(value)}; it must be an integer in {least}..{most}")
            put(name, int(value))
        for name, is_right, right in _REAL_PARAMETERS:
            value = getattr(self, name)
            if not (is_real(value) and is_right(float(value))):
                raise InvalidParameters(f"{name} is {shown(value)}; it must be {right}")
            put(name, float(value))
        if not all(isinstance(stop, str) and stop for stop in self.stop):
            raise InvalidParameters(f"stop is {shown(self.stop)}; it must be non-empty strings")
        if len(self.stop) > _MOST_STOPS or sum(map(len, self.stop)) > _MOST_STOP_CHARACTERS:
            raise InvalidParameters(
                f"stop has {len(self.stop):,} strings; at most {_MOST_STOPS:,} of {_MOST_STOP_CHARACTERS:,} characters together"
                " are looked for"
            )
        if len(self.stop_token_ids) > _MOST_STOP_TOKENS:
            raise InvalidParameters(
                f"stop_token_ids has {len(self.stop_token_ids):,} ids; at most {_MOST_STOP_TOKENS:,} are looked for"
            )
        if not all(is_whole(token) and 0 <= token <= MOST for token in self.stop_token_ids):
            raise InvalidParameters(
                f"stop_token_ids is {shown(self.stop_token_ids)}; it must be token ids of at least 0"
            )
        put("stop_token_ids", tuple(map(int, self.stop_token_ids)))
        if not all(map(callable, self.logits_processors)):
            raise InvalidParameters("logits_processors must be callables (tokens, logits) -> logits")
        if not isinstance(self.ignore_eos, (bool, np.bool_)):
            raise InvalidParameters(f"ignore_eos is {shown(self.ignore_eos)}; it must be True or False")

        self._take_rules(put)
        self._take_form(put)
        if self.min_tokens > self.max_tokens:
            raise InvalidParameters(f"min_tokens is {self.min_tokens}, above max_tokens, which is {self.max_tokens}")

    def _take_rules(self, put: Callable[[str, Any], None]) -> None:
        """Check and copy what concerns single tokens."""
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping) or not all(
            is_whole(token) and 0 <= token <= MOST and is_real(value) and -100 <= value <= 100
            for token, value in bias.items()
        ):
            raise InvalidParameters(
                f"logit_bias is {shown(bias)}; it must be a mapping of token ids to numbers in -100..100"
            )
        if len(bias) > _MOST_BIASED:
            raise InvalidParameters(f"logit_bias has {len(bias):,} tokens; {_MOST_BIASED:,} may have one")
        put("logit_bias", {int(token): float(value) for token, value in bias.items()})
        if self.allowed_token_ids is not None:
            allowed = as_tuple("allowed_token_ids", self.allowed_token_ids)
            if len(allowed) > _MOST_ALLOWED:
                raise InvalidParameters(f"allowed_token_ids has {len(allowed):,} ids; {_MOST_ALLOWED:,} are the most")
            if not allowed or not all(is_whole(token) and 0 <= token <= MOST for token in allowed):
                raise InvalidParameters(f"allowed_token_ids is {shown(allowed)}; it must be token ids, or None for all")
            put("allowed_token_ids", tuple(map(int, allowed)))
        put("bad_words", non_empty_texts("bad_words", self.bad_words))
        if len(self.bad_words) > _MOST_WORDS or sum(map(len, self.bad_words)) > _MOST_STOP_CHARACTERS:
            raise InvalidParameters(
                f"bad_words has {len(self.bad_words):,} texts; at most {_MOST_WORDS:,} of {_MOST_STOP_CHARACTERS:,} characters "
                "together are looked for"
            )

    def _take_form(self, put: Callable[[str, Any], None]) -> None:
        """Check and copy the form that the answer is held to."""
        if self.choice is not None:
            put("choice", non_empty_texts("choice", self.choice))
            if not self.choice:
                raise InvalidParameters("choice is empty; it must be texts to choose from, or None")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise InvalidParameters(f"{name} is {shown(value)}; it must be non-empty text, or None")
        if self.json_schema is not None:
            put("json_schema", json_schema_of(self.json_schema))
        if self.json_schema is not None:
            check_unicode("json_schema", (json.dumps(self.json_schema, ensure_ascii=False),))
        for name in ("stop", "bad_words", "choice"):
            check_unicode(name, getattr(self, name) or ())
        for name in ("regex", "grammar"):
            check_unicode(name, (getattr(self, name) or "",))
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidParameters(f"{' and '.join(given)} exclude each other: an answer has one form")
        ends = [name for name in ("stop", "stop_token_ids", "ignore_eos") if getattr(self, name)]
        if given and ends:
            raise InvalidParameters(f"{ends[0]} would end the answer elsewhere than {given[0]} does; leave it out")

    @property
    def form(self) -> str | None:
        """The name of the parameter that holds the answer to a form; None if nothing does."""
        return next((name for name in FORMS if getattr(self, name) is not None), None)


@dataclass(frozen=True)
class Video:
    """A video, and the choice of its frames.

    ``source`` is a file (path, URL, data URI or bytes), a sequence of frames (each whatever a picture can be, all of
    one size), or an array (T, H, W, 3) of uint8.

    A file is sampled at ``fps`` frames a second, evenly from its first frame to its last, but at ``max_frames`` at
    most; or it gives ``num_frames``. The family's published settings hold where none are given. Frames that are given one by
    one are all used, and ``fps`` says how many a second they are; ``max_frames`` and ``num_frames`` thin them evenly.
    Frames of more than ``max_pixels`` pixels are scaled down to that before the model's processor sees them.

    Raises InvalidParameters for a value out of range.
    """

    source: Any
    _: KW_ONLY
    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        fps = self.fps
        if fps is not None and not (is_real(fps) and fps > 0):
            raise InvalidParameters(f"fps is {shown(fps)}; it must be a finite number above 0")
        for name in ("num_frames", "max_frames", "max_pixels"):
            value = getattr(self, name)
            if value is not None and not (is_whole(value) and value >= 1):
                raise InvalidParameters(f"{name} is {shown(value)}; it must be an integer of at least 1")
        if self.num_frames is not None and self.max_frames is not None:
            raise InvalidParameters("num_frames and max_frames exclude each other")


#: The most seconds that reading one source may take: a day. Clocks and locks take no number that is much larger.
MAX_SECONDS = 86_400


@dataclass(frozen=True, kw_only=True)
class FetchPolicy:
    """Rules for reading pictures and videos that requests name by path or URL.

    ``allow_http`` reads http and https URLs; ``allow_private`` also those on loopback, private, link-local and other
    addresses that are not public. ``allow_files`` reads local paths, only below ``directories`` if any are named
    (links are followed first). At most ``max_bytes`` are read of a URL, a data URI or a picture's file, within
    ``seconds`` in all and over at most ``max_redirects``. A proxy that the environment names is used; it resolves names
    for itself, so behind one the check of addresses is only as good as the names' answers here.
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
                raise InvalidParameters(f"{name} is {shown(value)}; it must be True or False")
        for name, least in (("max_bytes", 1), ("max_redirects", 0)):
            if not (is_whole(value := getattr(self, name)) and value >= least):
                raise InvalidParameters(f"{name} is {shown(value)}; it must be an integer of at least {least}")
        if not (is_real(self.seconds) and 0 < self.seconds <= MAX_SECONDS):
            raise InvalidParameters(
                f"seconds is {shown(self.seconds)}; it must be a number above 0, {MAX_SECONDS:,} at most"
            )
        given = self.directories
        directories = (given,) if isinstance(given, (str, Path)) else as_tuple("directories", given)
        if isinstance(given, bytes) or not all(isinstance(one, (str, Path)) and str(one) for one in directories):
            raise InvalidParameters(f"directories is {shown(given)}; it must be a sequence of paths")
        object.__setattr__(self, "directories", directories)


@dataclass(frozen=True, kw_only=True)
class Template:
    """A request's words for the model's chat template. One that this checkpoint's template does not read is an error.

    Args:
        tools: functions that the model may call, in OpenAI's form.
        documents: mappings, as the template reads them.
        enable_thinking: whether a model that can think does so; None leaves it to the template.
        reasoning_effort: how much it thinks, in the template's own words.
        args: any other argument, by name.
        add_generation_prompt: begin the assistant's turn.
        continue_final_message: leave the chat's last turn open, so that the answer goes on with it.
        escape_special_tokens: read special tokens' spellings in the chat, such as ``<|im_end|>``, as plain text; else a chat
            that holds one of a turn's or a picture's is refused.

    Raises InvalidPrompt for a value of another type, and for an argument that is given twice.
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
            if not isinstance(value, (list, tuple)) or not all(isinstance(one, Mapping) for one in value):
                raise InvalidPrompt(f"{name} is {shown(value)}; it must be a list of mappings, or None")
            put(name, [dict(one) for one in value])
        if self.enable_thinking is not None and not isinstance(self.enable_thinking, bool):
            raise InvalidPrompt(f"enable_thinking is {shown(self.enable_thinking)}; it must be True, False or None")
        if self.reasoning_effort is not None and not isinstance(self.reasoning_effort, str):
            raise InvalidPrompt(f"reasoning_effort is {shown(self.reasoning_effort)}; it must be text, or None")
        if not isinstance(self.args, Mapping) or not all(isinstance(name, str) for name in self.args):
            raise InvalidPrompt(f"args is {shown(self.args)}; it must be a mapping of names to values")
        put("args", dict(self.args))
        if twice := sorted(self.args.keys() & self._own.keys()):
            raise InvalidPrompt(f"{twice[0]} is given twice: by itself and in args")
        for name in ("add_generation_prompt", "continue_final_message", "escape_special_tokens"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise InvalidPrompt(f"{name} is {shown(getattr(self, name))}; it must be True or False")

    @property
    def _own(self) -> dict[str, Any]:
        names = ("tools", "documents", "enable_thinking", "reasoning_effort")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def arguments(self) -> dict[str, Any]:
        """All that is said, by the template's names."""
        return {**self.args, **self._own}

    @property
    def said(self) -> list[str]:
        """The names of what is not as by default."""
        turn = [] if self.add_generation_prompt or self.continue_final_message else ["add_generation_prompt=False"]
        return sorted(self.arguments) + turn + ["continue_final_message"] * bool(self.continue_final_message)


PLAIN_TEMPLATE = Template()
#: The largest priority of a request, above and below 0.
MAX_PRIORITY = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Request:
    """One question: exactly one of ``prompt``, ``messages``, ``token_ids`` or ``inputs``, with its pictures and videos.

    Args:
        prompt: a single user's turn.
        messages: a chat in OpenAI's form (``{"role": ..., "content": str | [parts]}``). Pictures and videos may stand in its
            parts or in ``images`` and ``videos``, in order.
        token_ids: final tokens, in which the pictures and videos have their placeholders already.
        inputs: what ``mlx_vlm.utils.prepare_inputs`` returns: ``input_ids`` (1, L), ``pixel_values``, ...
        images: a picture (path, URL, data URI, bytes, PIL image, array), or several.
        videos: a video (path, URL, data URI, bytes, array (T, H, W, 3), or a ``Video``, which also holds frames), or several.
        template: what the chat template is told, as a ``Template`` or a mapping of its fields; None for a prompt that is
            final text, with its placeholders.
        min_pixels: the least that the model sees of each picture, where the family's processor has such bounds. The sizes
            are in ``Result.model_image_sizes``.
        max_pixels: the most, likewise.
        params: how tokens are chosen, as ``SamplingParams`` or a mapping of its fields.
        request_id: the request's name; by default it is given one.
        priority: a higher one goes first.
        client: who asks, as a number. Rows are shared out evenly among clients; priorities order the requests of each.
        cache: the state of a conversation that the prompt goes on with: only what is new is prefilled.
        return_cache: ask for that state, of prompt and answer, in ``Result.cache``.

    Raises InvalidRequest.
    """

    prompt: str | None = None
    messages: Sequence[Message] | None = None
    token_ids: Sequence[int] | np.ndarray | None = None
    inputs: Mapping[str, Any] | None = None
    images: ImageInput | Sequence[ImageInput] = ()
    videos: VideoInput | Sequence[VideoInput] = ()
    template: Template | None = PLAIN_TEMPLATE
    min_pixels: int | None = None
    max_pixels: int | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    priority: int = 0
    client: int = 0
    cache: PromptCache | None = None
    return_cache: bool = False

    def __post_init__(self) -> None:
        for name in ("images", "videos"):
            object.__setattr__(self, name, _together(getattr(self, name)))
        object.__setattr__(self, "params", params_of(self.params))
        if self.template is not None:
            object.__setattr__(self, "template", record_of(Template, "template", self.template, InvalidPrompt))
        if not (is_whole(self.priority) and abs(self.priority) <= MAX_PRIORITY):
            raise InvalidRequest(
                f"priority is {shown(self.priority)}; it must be an integer in -{MAX_PRIORITY}..{MAX_PRIORITY}"
            )
        object.__setattr__(self, "priority", int(self.priority))
        if not is_whole(self.client):
            raise InvalidRequest(f"client is {shown(self.client)}; it must be an integer")
        object.__setattr__(self, "client", int(self.client))
        called = self.request_id
        if called is not None and not (isinstance(called, str) and called and "\0" not in called):
            raise InvalidRequest(
                f"request_id is {shown(called)}; it must be text, not empty and without null characters, or None"
            )
        put_pixels(self, self.min_pixels, self.max_pixels)
        if self.params.prompt_logprobs is not None and (self.cache is not None or self.return_cache):
            raise InvalidRequest("prompt_logprobs need every token prefilled; leave cache and return_cache out")
        if not isinstance(self.return_cache, (bool, np.bool_)):
            raise InvalidRequest(f"return_cache is {shown(self.return_cache)}; it must be True or False")


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probabilities of one step: the chosen token's, and the most likely tokens' in falling order."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Usage:
    """Token counts of a request; ``image_tokens`` are the prompt positions that hold picture or video features.

    ``cached_tokens`` of the prompt's positions were not prefilled, because an earlier request or the request's own
    ``cache`` had left their keys and values.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    image_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds of a request's life: waiting for a place, being encoded (some are before they have one), from its place to its
    first token, then to its end.

    Within ``queue``, ``read`` is from the beginning of its reading until its files and URLs were in memory, and ``process``
    their decoding and the processor. ``ttft`` is from submit to the first token. While it is prefilled and decodes, a
    request shares the device.
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
    """The end of a request, with its answer. ``error`` is set if and only if ``finish_reason`` is ``"error"``.

    ``image_sizes`` are the pictures' (width, height) as they were read; ``model_image_sizes`` are what the processor
    made of them where it says so (families with a patch grid). ``video_sizes`` are the videos' (frames, width,
    height) as the processor was given them. ``parsed`` is the value of an answer that was held to a form: what its JSON
    says, or its text; None if it ended before it had the form. ``stop_reason`` is the matched stop string or token id.
    ``prompt_logprobs`` has an entry for each position of the prompt, pictures included: None for the first, for pictures'
    positions and for tokens that the model sees before it would have to tell them.
    ``others`` are the further answers of a request that asked for several (``n``), each with its own end and usage.
    ``cache`` holds the conversation's state, where the request asked for it (``return_cache``).
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
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    parsed: Any = None
    others: tuple[Result, ...] = ()
    error: str | None = None
    if TYPE_CHECKING:
        exception: BaseException | None = None
        cache: PromptCache | None = None
    else:  # objects, not data: set like the others, and left out by dataclasses.asdict, which goes to JSON
        exception: InitVar[BaseException | None] = None
        cache: InitVar[PromptCache | None] = None

        def __post_init__(self, exception: BaseException | None, cache: PromptCache | None) -> None:
            object.__setattr__(self, "exception", exception)
            object.__setattr__(self, "cache", cache)

    @property
    def ok(self) -> bool:
        """Whether the answer is complete: ended by a stop or by its length."""
        return self.finish_reason in ("stop", "length")

    def raise_for_error(self) -> Result:
        """Return self, or raise RequestFailed with the request's error."""
        if self.error is not None:
            raise RequestFailed(f"request {self.request_id}: {self.error}") from self.exception
        return self


def failed_result(request_id: str, error: BaseException) -> Result:
    """The end of a request of which nothing else is known."""
    return Result(request_id=request_id, finish_reason="error", error=describe(error), exception=let_go(error))


@dataclass(frozen=True, slots=True)
class Event:
    """One step of one request as the engine saw it: a token with the text that it completed, or an end, or both.

    ``result`` is there if and only if the request ended with this event. Of a request with several answers, ``index``
    says which of them it is about, and ``answer`` how that one ended.
    """

    request_id: str
    token: int | None = None
    text: str = ""
    logprobs: TokenLogprobs | None = None
    result: Result | None = None
    index: int = 0
    answer: Result | None = None


@dataclass(frozen=True)
class Stats:
    """Counters of a batcher: its state now, and totals since it was made."""

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
    cache_hits: int = 0  # requests that took a beginning from earlier ones
    cached_tokens: int = 0  # prompt positions that they took
    cache_bytes: int = 0  # kept for later requests
    steps: int = 0  # that the engine has taken: while anything runs, this grows, or the engine hangs
    recomputed: int = 0  # requests that began again, after a failed step or for want of memory: they say nothing twice
    input_bytes: int = 0  # processors' outputs of requests that are alive, on the host
    max_kv_bytes: int | None = None  # the bound on kv_bytes
    mlx_bytes: int = 0  # all that MLX holds in this process: weights, and everything here but input_bytes
    stalled: float = 0.0  # seconds that the engine has been in a step that does not end; 0 while it goes on
    ahead_bytes: int = 0  # of what was read and prepared for requests that wait
    most_rows: int = 0  # requests that may decode and be prefilled at a time now; max_rows=None lets it grow and shrink
    busy_seconds: float = 0.0  # that the engine had requests to work on, and did not wait for their pictures


def fresh_seed() -> int:
    """A seed of 64 bits from the operating system, for a request that named none."""
    return int.from_bytes(os.urandom(8), "little")


def _together(given: Any) -> tuple[Any, ...]:
    """Pictures or videos of a request: several in a list, tuple or iterator, or one by itself, or None."""
    if isinstance(given, (list, tuple)) or (isinstance(given, Iterator) and not isinstance(given, IOBase)):
        return tuple(given)
    return () if given is None else (given,)


def params_of(given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """Parameters from what people write: an object, a mapping of its fields, or None for the defaults."""
    return SamplingParams() if given is None else record_of(SamplingParams, "params", given, InvalidParameters)


def record_of(kind: type[Kind], name: str, given: Any, error: type[InvalidRequest]) -> Kind:
    """A record from what people write: itself, or a mapping of its fields. Raises ``error`` for anything else."""
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise error(f"{name} is {shown(given)}; it must be a {kind.__name__} or a mapping of its fields")
    known = {field.name for field in fields(kind)}
    unknown = sorted(str(one) for one in given if one not in known)
    if unknown:
        raise error(f"{name} has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    return kind(**given)
