"""OpenAI's batch form: a line is ``{"custom_id", "method", "url", "body"}``, and a body is a chat completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
}
#: Fields that change no answer here; the model is the job's.
_WITHOUT_EFFECT = frozenset({"model", "user", "metadata", "store", "service_tier"})
#: Fields that are taken with the value that means nothing.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (1, None),
    "stream": (False, None),
    "logprobs": (False, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "response_format": ({"type": "text"}, None),
    "tools": ([], None),
    "tool_choice": ("none", None),
}


def row_of_body(line: Mapping[str, Any], place: str) -> Row:
    """A line's row. A field is honoured or refused by its name, never left out in silence."""
    row_id, body = str(line["custom_id"]), line["body"]
    wrong = _wrong(line)
    if wrong is not None:
        return Row(id=row_id, error=f"{place}: {wrong}")
    params = {_PARAMS[name]: value for name, value in body.items() if name in _PARAMS and value is not None}
    return Row(id=row_id, messages=body["messages"], params=params, columns={"custom_id": row_id})


def _wrong(line: Mapping[str, Any]) -> str | None:
    body = line["body"]
    if line.get("method", "POST") != "POST" or line.get("url", "/v1/chat/completions") != "/v1/chat/completions":
        return f"{line.get('method', 'POST')} {line.get('url')} is not answered here; POST /v1/chat/completions is"
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        return "body has no list of messages"
    for name, value in body.items():
        if name in _ONLY and value not in _ONLY[name]:
            return f"{name} is {value!r}, which is not done here"
        if name not in _PARAMS and name not in _ONLY and name not in _WITHOUT_EFFECT and name != "messages":
            return f"body has {name!r}, which is not known here"
    return None
