"""Sampling that bodies ask for, as fields of ``SamplingParams`` and of ``Ask``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vlm_batch.errors import shown
from vlm_batch.server.asking import MAX_PRIORITY
from vlm_batch.server.errors import ApiError
from vlm_batch.server.fields import ALIASES, SAMPLING
from vlm_batch.server.sampled import Common, StructuredOutputs, VllmArguments
from vlm_batch.server.wire import Wire
from vlm_batch.types import FORMS

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
#: Fields of completions that are parameters of sampling.
_OF_COMPLETIONS = {**SAMPLING, "n": "n"}
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
        ours = table[name]
        if ours in found:
            why = f"{name} and {by[ours]} say the same; give one"
            raise ApiError(400, why, param=name)
        found[ours] = _CONVERSIONS.get(name, _as_it_is)(value)
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
    given = asked_of(body, _OF_COMPLETIONS)
    given |= _ngrams(body.vllm_xargs)
    forms = _structured(body.structured_outputs)
    num_forms = len(forms) + len(given.keys() & set(FORMS))
    if forms and num_forms > 1:
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
    return {**given, "max_tokens": max_tokens, "logprobs": logprobs}


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
    said = given.model_dump(exclude={"debug"}, exclude_none=True)
    older = said.pop("ngram_size", 0)
    size = said.pop("no_repeat_ngram_size", older)
    if size <= 0:  # off, as there
        return {}
    return {"whitelist_token_ids": (), **said, "no_repeat_ngram_size": size}


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


def _as_it_is(value: Any) -> Any:
    return value


_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "response_format": _format,
    "logit_bias": _bias,
    "seed": _seed,
}
