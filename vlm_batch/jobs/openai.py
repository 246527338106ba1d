"""OpenAI's batch form: a line is ``{"custom_id", "method", "url", "body"}``, and a body is a chat completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlm_batch.jobs.cells import hint
from vlm_batch.jobs.rows import Row

#: Fields of a body that are sampling parameters here, and their names.
_PARAMS = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repetition_penalty": "repetition_penalty",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "n": "n",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "logit_bias": "logit_bias",
    "response_format": "json_schema",
}
#: Fields that change no answer here; the model is the job's.
_WITHOUT_EFFECT = frozenset({"model", "user", "metadata", "store", "service_tier"})
#: Fields that are taken with the value that means nothing.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "stream": (False, None),
    "tools": ([], None),
    "tool_choice": ("none", None),
}
_LINE = ("custom_id", "method", "url", "body")
_KNOWN = frozenset((*_PARAMS, *_ONLY, *_WITHOUT_EFFECT, "messages", "logprobs", "top_logprobs"))


def row_of_body(line: Mapping[str, Any], place: str) -> Row:
    """A line's row. A field is honoured or refused by its name, never left out in silence."""
    row_id, body = str(line["custom_id"]), line["body"]
    wrong = _wrong(line)
    if wrong is not None:
        return Row(id=row_id, error=f"{place}: {wrong}")
    try:
        params = _params(body)
    except ValueError as error:
        return Row(id=row_id, error=f"{place}: {error}")
    return Row(id=row_id, messages=body["messages"], params=params, columns={"custom_id": row_id})


def _params(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a body. Raises ValueError for a form or bias that is not as OpenAI has it."""
    given = {name: value for name, value in body.items() if name in _PARAMS and value is not None}
    if "response_format" in given and (schema := _schema(given.pop("response_format"))) is not None:
        given["response_format"] = schema
    if "logit_bias" in given:
        if not isinstance(given["logit_bias"], dict):
            raise ValueError("logit_bias maps token ids to numbers")
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    params = {_PARAMS[name]: value for name, value in given.items()}
    if body.get("logprobs"):
        params["logprobs"] = body.get("top_logprobs") or 0
    elif body.get("top_logprobs"):
        raise ValueError("top_logprobs needs logprobs: true")
    return params


def _schema(given: Any) -> Mapping[str, Any] | None:
    """The JSON schema that a ``response_format`` stands for; None for text. Raises ValueError."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = (
        given["json_schema"].get("schema")
        if kind == "json_schema" and isinstance(given.get("json_schema"), dict)
        else None
    )
    if not isinstance(schema, dict):
        raise ValueError("response_format is text, json_object, or json_schema with its schema")
    return schema


def _wrong(line: Mapping[str, Any]) -> str | None:
    body = line["body"]
    if strange := [name for name in line if name not in _LINE]:
        return f"the line has {strange[0]!r} beside its body{hint(strange[0], _LINE)}"
    if line.get("method", "POST") != "POST" or line.get("url", "/v1/chat/completions") != "/v1/chat/completions":
        return f"{line.get('method', 'POST')} {line.get('url')} is not answered here; POST /v1/chat/completions is"
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        return "body has no list of messages"
    for name, value in body.items():
        if name in _ONLY and value not in _ONLY[name]:
            return f"{name} is {value!r}, which is not done here"
        if name not in _KNOWN:
            return f"body has {name!r}, which is not known here{hint(name, _KNOWN)}"
    return None
