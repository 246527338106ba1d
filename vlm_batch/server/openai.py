"""The common part of OpenAI's two kinds of completions: sampling as it comes in, choices and chunks as they go out."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue
from pydantic_core import PydanticCustomError

from vlm_batch._version import __version__
from vlm_batch.errors import shown
from vlm_batch.server.answers import Delta
from vlm_batch.server.asking import MAX_PRIORITY, NO_LIMIT
from vlm_batch.server.door import Core
from vlm_batch.server.edge import Entry
from vlm_batch.server.errors import ApiError
from vlm_batch.server.exchange import Choice, Exchange, event_bytes
from vlm_batch.server.fields import ALIASES, SAMPLING
from vlm_batch.server.wire import (
    ANY,
    Body,
    Json,
    Many,
    Member,
    Metadata,
    Name,
    Nothing,
    Number,
    Stops,
    Wire,
    at_most,
)
from vlm_batch.types import FORMS, TokenLogprobs

#: Limits on one request's contents.
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 4096
MAX_BIASES = 1024

DONE = b"data: [DONE]\n\n"
#: OpenAI's ``system_fingerprint``: seeds give the same answers while it stays the same.
FINGERPRINT = f"vlm-batch-{__version__}"

#: Fields of vLLM's that are not served, and values beside null that change nothing (``REFUSED`` says why others are refused).
_NOTHING_IN_VLLM: Nothing = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "truncate_prompt_tokens": (),
    # of what truncate_prompt_tokens leaves out
    "truncation_side": ("left", "right"),
    "request_id": (),
    # a conversation's name; prefixes are found by content
    "session_id": ANY,
    "logprob_token_ids": (),
    "repetition_detection": (),
    "watermarking": (False,),
    "stream_interval": (1,),
    "routed_experts_prompt_start": (0,),
    "return_prompt_text": (False,),
    # of vLLM's paths that only render
    "return_token_offsets": ANY,
    "return_mm_kwargs": ANY,
}
#: Those of llama.cpp's, and of mlx-vlm's samplers.
_NOTHING_IN_LLAMA_CPP: Nothing = {
    # prefixes are always kept
    "cache_prompt": (True,),
    "n_cache_reuse": (0,),
    # a place in the server, with the prefix that it keeps
    "id_slot": ANY,
    "n_predict": (-1,),
    "n_cmpl": (1,),
    "n_keep": (0,),
    "n_discard": (0,),
    "n_indent": (0,),
    "t_max_predict_ms": (-1, 0),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "min_keep": (0,),
    "typical_p": (1,),
    "p_less": (False,),
    "top_n_sigma": (-1, 0),
    "repeat_penalty": (1,),
    # of each sampler, what turns it off; the others say how it would work
    "xtc_probability": (0,),
    "xtc_threshold": ANY,
    "dynatemp_range": (0,),
    "dynatemp_exponent": ANY,
    "dry_multiplier": (0,),
    "dry_base": ANY,
    "dry_allowed_length": ANY,
    "dry_penalty_last_n": ANY,
    "dry_sequence_breakers": ANY,
    "mirostat": (0,),
    "mirostat_tau": ANY,
    "mirostat_eta": ANY,
    "adaptive_target": (-1,),
    "adaptive_decay": ANY,
    "backend_sampling": ANY,
    "grammar": ("",),
    "lora": ([],),
    "response_fields": ([],),
    "samplers": (),
    "return_tokens": (False,),
    "return_progress": (False,),
    "timings_per_token": (False,),
    "verbose": (False,),
    "reasoning_format": ("auto", "deepseek"),
    "reasoning_control": (False,),
    "parse_tool_calls": (True,),
    # comments in a stream that is silent
    "sse_ping_interval": ANY,
}
#: Fields of other servers' that are not served, and values beside null that change nothing, which some clients always send.
NOTHING: Nothing = {
    **_NOTHING_IN_VLLM,
    **_NOTHING_IN_LLAMA_CPP,
    "store": (False,),
    "service_tier": ("auto", "default", "flex", "priority", "scale"),
    "best_of": (1,),
    "suffix": ("",),
    "moderation": (),
    "prompt_cache_retention": (),
    "prompt_cache_options": ({},),
}
#: Refused fields of other servers', and why.
REFUSED: Mapping[str, str] = {
    "audio": "audio is not made here",
    "best_of": "use n, and choose among the answers",
    "function_call": "use tools and tool_choice",
    "functions": "use tools",
    "grammar": "use guided_grammar, in Lark's notation",
    "logprob_token_ids": "log-probabilities are those of the likeliest tokens; use top_logprobs",
    "moderation": "nothing is moderated",
    "n_cmpl": "use n",
    "n_predict": "use max_tokens",
    "n_probs": "use logprobs",
    "prediction": "answers are not speculated",
    "prompt_cache_retention": "prefixes are kept as long as they fit",
    "repeat_last_n": "use repetition_context_size",
    "repeat_penalty": "use repetition_penalty",
    "resize_shape": "it sets the sides of pictures, up and down; min_pixels and max_pixels bound their pixels",
    "stream_interval": "every token is told when it comes",
    "suffix": "text is only added at the end",
    "verbosity": "no family has a control for it",
    "web_search_options": "nothing is searched",
}

# Types -----------------------------------------------------------------------------------------------------------------

Biases: TypeAlias = Annotated[dict[str, Number], BeforeValidator(at_most(MAX_BIASES))]
#: How many likely tokens are told beside the chosen one.
NumTops: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Texts: TypeAlias = Annotated[list[str], Field(fail_fast=True, max_length=MAX_CHOICES)]


def _is_length(value: int) -> int:
    if value == NO_LIMIT or 0 <= value < 2**63:
        return value
    raise PydanticCustomError("out_of_range", "it must be an integer of at least 1")


#: How many tokens an answer may have.
NumTokens: TypeAlias = Annotated[int, AfterValidator(_is_length)]


class StreamOptions(Wire):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class VllmArguments(Wire):
    """Arguments of vLLM's processors against repeated sequences: DeepSeek-OCR's (``ngram_size``) and MinerU's."""

    no_repeat_ngram_size: int | None = None
    ngram_size: int | None = None
    window_size: int | None = None
    whitelist_token_ids: Many[int] | None = None
    debug: bool | None = None  # a word in vLLM's log


class Schema(Wire):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")


class TextFormat(Member):
    type: Literal["text"]


class ObjectFormat(Member):
    type: Literal["json_object"]


class FittingFormat(ObjectFormat):
    """Any object, or one that fits a schema, as llama.cpp's clients write it."""

    schema_: Json | None = Field(None, alias="schema")


class SchemaFormat(Member):
    type: Literal["json_schema"]
    json_schema: Schema


class StructuredOutputs(Wire):
    """vLLM's form of an answer: one of the first five fields."""

    json_: Json | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: Literal[False] | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None


ResponseFormat: TypeAlias = Annotated[
    TextFormat | FittingFormat | SchemaFormat, Field(discriminator="type")
]


class SampledBody(Body):
    """Sampling, at every door: OpenAI's fields, and those that vLLM's, mlx-vlm's and llama.cpp's clients add."""

    sampling: Literal["greedy", "recommended"] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    repetition_context_size: int | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Biases | None = None
    min_tokens: int | None = None
    bad_words: Many[str] | None = None
    allowed_token_ids: Many[int] | None = None
    seed: int | None = None
    stop_token_ids: Many[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class ThoughtBody(SampledBody):
    """Sampling, and thinking as mlx-vlm's clients write it."""

    enable_thinking: bool | None = None
    thinking_budget: int | None = None


class Common(SampledBody):
    """The common part of the bodies of both kinds of completions."""

    nothing = NOTHING
    refused = REFUSED
    stream_options: StreamOptions | None = None
    max_tokens: NumTokens | None = None
    n: int | None = None
    prompt_logprobs: NumTops | None = None
    priority: int | None = None
    cache_salt: Name | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stop: str | Stops | None = None
    vllm_xargs: VllmArguments | None = None
    json_schema: Json | str | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    # Without effect: prefixes are found by content.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Metadata | None = None


# In --------------------------------------------------------------------------------------------------------------------

#: Values that change nothing, which some clients always send.
NEUTRAL: Mapping[str, Any] = {
    "top_k": -1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "min_tokens": 0,
    "bad_words": [],
    "response_format": {"type": "text"},
    "documents": [],
    "chat_template_kwargs": {},
    "add_generation_prompt": True,
    "continue_final_message": False,
    "thinking_token_budget": -1,
    "thinking_budget_tokens": -1,
}
#: Stands for no value.
_NONE = object()


def asked_of(body: Wire, table: Mapping[str, str]) -> dict[str, Any]:
    """Return what a body says of a table's fields, by our names, without what asks for nothing."""
    names = body.model_fields_set & table.keys()
    said = body.model_dump(include=names, by_alias=True, exclude_none=True)
    found: dict[str, Any] = {}
    by: dict[str, str] = {}
    for name in sorted(said):
        value = said[name]
        if value == NEUTRAL.get(name, _NONE):
            continue
        convert = _CONVERSIONS.get(name)
        ours = table[name]
        if ours in found:
            why = f"{name} and {by[ours]} say the same; give one"
            raise ApiError(400, why, param=name)
        found[ours] = value if convert is None else convert(value)
        by[ours] = name
    return found


def sampling_of(
    body: Common,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    echoes: bool = False,
) -> dict[str, Any]:
    """Return what a body says of sampling, as fields of ``SamplingParams``. Raises ApiError."""
    given = asked_of(body, SAMPLING)
    given |= _ngrams(body.vllm_xargs)
    forms = _structured(body.structured_outputs)
    if len(forms) > 1 or (forms and set(FORMS) & given.keys()):
        said = "structured_outputs: an answer has one form"
        raise ApiError(400, said, param="structured_outputs")
    given |= forms
    if echoes and (logprobs is not None or max_tokens == 0):
        most = max(logprobs or 0, given.get("prompt_logprobs", 0))
        given["prompt_logprobs"] = most
    if max_tokens == 0 and "prompt_logprobs" not in given:
        name = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
        said = "an answer has at least one token, but with prompt_logprobs"
        raise ApiError(400, f"{name} is 0; {said}", param=name)
    n = 1 if body.n is None else body.n
    return {**given, "max_tokens": max_tokens, "logprobs": logprobs, "n": n}


def others_of(body: Common) -> dict[str, Any]:
    """Return the fields of ``Ask`` that are no chat's and no sampling."""
    # vLLM's lower goes first
    priority = -(body.priority or 0)
    return {
        "returns_ids": bool(body.return_token_ids),
        "priority": max(-MAX_PRIORITY, min(MAX_PRIORITY, priority)),
        "cache_salt": body.cache_salt,
        "user": body.user or body.safety_identifier,
    }


def check_stream(body: Common) -> None:
    """Raise ApiError for what needs a stream, or cannot be streamed."""
    if not body.stream and body.stream_options is not None:
        said = "stream_options needs stream: true"
        raise ApiError(400, said, param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        said = "prompt_logprobs come with the whole answer; leave stream out"
        raise ApiError(400, said, param="prompt_logprobs")


def names_of(body: Common) -> dict[str, str]:
    """Return the fields that errors may name -> the ones that this body has in their place."""
    said = body.model_fields_set & ALIASES.keys()
    aliases = {ALIASES[name]: name for name in said if getattr(body, name) is not None}
    given = body.structured_outputs
    if given is None:
        return aliases
    own = {
        "response_format": "json_object" if given.json_object else "json",
        "guided_regex": "regex",
        "guided_choice": "choice",
        "guided_grammar": "grammar",
    }
    unsaid = own.keys() - body.model_fields_set
    return aliases | {name: f"structured_outputs.{own[name]}" for name in unsaid}


def _ngrams(given: VllmArguments | None) -> dict[str, Any]:
    """Return the sampling parameters of vLLM's processors against repeated sequences."""
    if given is None:
        return {}
    size = given.no_repeat_ngram_size
    if size is None:
        size = given.ngram_size
    if not size or size < 0:  # off, as there
        return {}
    white = given.whitelist_token_ids or ()
    found = {"no_repeat_ngram_size": size, "whitelist_token_ids": white}
    if given.window_size is not None:
        found["window_size"] = given.window_size
    return found


def _structured(asked: StructuredOutputs | None) -> dict[str, Any]:
    if asked is None:
        return {}
    schema = {"type": "object"} if asked.json_object else asked.json_
    found = {
        "json_schema": schema,
        "regex": asked.regex,
        "choice": asked.choice,
        "grammar": asked.grammar,
    }
    return {name: value for name, value in found.items() if value is not None}


def _format(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if value["type"] == "json_object":
        return value.get("schema") or {"type": "object"}
    schema: Mapping[str, Any] = value["json_schema"]["schema"]
    return schema


def _seed(value: int) -> int:
    """Return a negative seed's bits as unsigned."""
    if not -(2**63) <= value < 2**64:
        bounds = f"{-(2**63)}..{2**64 - 1}"
        said = f"seed is {shown(value)}; it must be an integer in {bounds}"
        raise ApiError(400, said, param="seed")
    return value % 2**64


def _bias(value: Mapping[str, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, bias in value.items():
        is_id = key.isascii() and key.isdecimal() and len(key) <= 10
        if not is_id:
            said = f"has the key {shown(key)}; it must be a token id"
            raise ApiError(400, f"logit_bias {said}", param="logit_bias")
        token = int(key)
        if token in found:
            said = f"has the token {token} twice, as {shown(key)}, too"
            raise ApiError(400, f"logit_bias {said}", param="logit_bias")
        found[token] = bias
    return found


_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "response_format": _format,
    "logit_bias": _bias,
    "seed": _seed,
}

# Out -------------------------------------------------------------------------------------------------------------------


class Completions(Exchange):
    """A body's answers as OpenAI's choices, whole or in chunks."""

    prefix: str
    kind: str
    chunk_kind: str
    body: Common

    def __init__(
        self, core: Core, entry: Entry, body: Common, *, priority: int = 0
    ) -> None:
        super().__init__(core, entry, body, priority=priority)
        self.names = names_of(body)
        self.tells_tokens = bool(body.return_token_ids)
        options = body.stream_options or StreamOptions()
        self._includes_usage = bool(options.include_usage)
        self._has_running_usage = bool(options.continuous_usage_stats)

    @abstractmethod
    def _whole(self, choice: Choice) -> dict[str, Any]:
        """Return an answer that has ended."""

    @abstractmethod
    def _opening(self, choice: Choice) -> dict[str, Any] | None:
        """Return what goes before an answer's first piece."""

    @abstractmethod
    def _part(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """Return a piece of an answer."""

    @abstractmethod
    def _ending(self, choice: Choice) -> dict[str, Any]:
        """Return what goes behind an answer's last piece."""

    def answer(self) -> dict[str, Any]:
        choices = [self._whole(choice) for choice in self.choices]
        usage = self._usage()
        return {**self._head(self.kind), "choices": choices, "usage": usage}

    def told(self, choice: Choice, delta: Delta) -> bytes:
        """Join a delta's bytes, to save system calls."""
        told = [] if choice.has_begun else self._openings(choice)
        usage = self._running_usage() if self._has_running_usage else None
        if not delta.is_empty:
            ids = self.token_ids(delta.token_ids)
            part = {**self._part(choice, delta), **ids}
            told.append(self._told(choice, part, usage))
        if choice.result is not None:
            told.append(self._told(choice, self._ending(choice), usage))
        return b"".join(told)

    def _openings(self, choice: Choice) -> list[bytes]:
        """Open all answers of a choice's prompt, in order, before the first piece of any.

        openai's helpers append an answer that they do not know, whatever its index.
        """
        n = self.body.n or 1
        first = choice.index - choice.index % n
        answers = self.choices[first : first + n]
        for one in answers:
            one.has_begun = True
            # they share the prompt, and only one of them may have had an event
            one.prompt_tokens = choice.prompt_tokens
            one.prompt_token_ids = choice.prompt_token_ids
        usage = self._running_usage() if self._has_running_usage else None
        told = []
        for one in answers:
            opening = self._opening(one)
            if opening is not None:
                told.append(self._told(one, opening, usage))
        return told

    def last(self) -> bytes:
        if not self._includes_usage:
            return DONE
        return self._chunk([], self._usage()) + DONE

    def failed(self, error: ApiError) -> bytes:
        return event_bytes(error.body) + DONE

    def _told(
        self, choice: Choice, part: Mapping[str, Any], usage: Mapping[str, Any] | None
    ) -> bytes:
        of_prompt = {} if choice.has_told_prompt else self.prompt_ids(choice)
        choice.has_told_prompt = True
        return self._chunk([part], usage, of_prompt)

    def token_ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return an answer's tokens in vLLM's form, if they are asked for."""
        return {"token_ids": list(token_ids)} if self.tells_tokens else {}

    def prompt_ids(self, choice: Choice) -> dict[str, Any]:
        """Return the prompt's tokens in vLLM's form, if they are asked for."""
        return (
            {"prompt_token_ids": choice.prompt_token_ids} if self.tells_tokens else {}
        )

    def prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """Return the prompt's log-probabilities in vLLM's form, or null."""
        assert choice.result is not None
        scores = choice.result.prompt_logprobs
        if scores is None or self.body.prompt_logprobs is None:
            return {"prompt_logprobs": None}
        return {"prompt_logprobs": [self._score(one) for one in scores]}

    def _score(self, one: TokenLogprobs | None) -> dict[str, Any] | None:
        if one is None:
            return None
        told: dict[int, dict[str, Any]] = {
            one.token_id: {"logprob": finite(one.logprob)}
        }
        for rank, (token, logprob) in enumerate(one.top, 1):
            told[token] = {"logprob": finite(logprob), "rank": rank}
        for token, entry in told.items():
            entry["decoded_token"] = self.dialect.token(token)[0]
        return {str(token): entry for token, entry in told.items()}

    def token_text(self, token_id: int) -> str:
        """Return a token's text for log-probabilities, or its id in vLLM's notation."""
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self.dialect.token(token_id)[0]

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.entry.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.core.service.config.name,
            "system_fingerprint": FINGERPRINT,
        }

    def _chunk(
        self,
        choices: Sequence[Mapping[str, Any]],
        usage: Mapping[str, Any] | None,
        of_prompt: Mapping[str, Any] | None = None,
    ) -> bytes:
        chunk = {**self._head(self.chunk_kind), "choices": choices, **(of_prompt or {})}
        if self._includes_usage:
            chunk["usage"] = usage
        return event_bytes(chunk)

    def _usage(self) -> dict[str, Any]:
        counts = self.counts()
        return {
            "prompt_tokens": counts.prompt,
            "completion_tokens": counts.completion,
            "total_tokens": counts.prompt + counts.completion,
            "prompt_tokens_details": {
                "cached_tokens": counts.cached,
                "image_tokens": counts.images,
            },
            "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
        }

    def _running_usage(self) -> dict[str, int]:
        """Count tokens so far, as vLLM does."""
        firsts = [choice for choice in self.choices if choice.is_first_of_prompt]
        prompt = sum(choice.prompt_tokens for choice in firsts)
        completion = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def ending_of(choice: Choice) -> dict[str, Any]:
    """Return why an answer has ended."""
    assert choice.result is not None
    reason = choice.finish_reason
    return {"finish_reason": reason, "stop_reason": choice.result.stop_reason}


def finite(logprob: float) -> float:
    """Bound a log-probability as OpenAI: -9999 for an impossible token; what is no number is null elsewhere."""
    return max(logprob, -9999.0)


def known(logprob: float) -> float | None:
    """Return a log-probability, or null for the first token of a prompt, which has none."""
    return None if math.isnan(logprob) else finite(logprob)
