"""OpenAI's batch form.

A request is ``{"custom_id", "method", "url", "body"}``, an answer ``{"id", "custom_id", "response": {"status_code",
"request_id", "body"}, "error"}``. Source: OpenAI's API reference, batch request input and output objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlm_batch.jobs.cells import did_you_mean, id_of
from vlm_batch.jobs.questions import PARAMETERS
from vlm_batch.jobs.rows import JobRow, digest

#: Parameters that a body spells in other fields.
_SPELLED = ("json_schema", "logprobs")
#: Fields of a body, and the sampling parameters that they set.
_PARAMS = {name: name for name in PARAMETERS if name not in _SPELLED} | {
    "max_completion_tokens": "max_tokens",
    "response_format": "json_schema",
}
#: Fields without effect; the job chooses the model.
_WITHOUT_EFFECT = frozenset({"model", "user", "metadata", "store", "service_tier"})
#: Fields accepted only with a value that changes nothing.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "stream": (False, None),
    "tools": ([], None),
    "tool_choice": ("none", None),
}
_URL = "/v1/chat/completions"
_LINE = ("custom_id", "method", "url", "body")
_KNOWN = frozenset(
    (*_PARAMS, *_ONLY, *_WITHOUT_EFFECT, "messages", "logprobs", "top_logprobs")
)


def row_of_body(line: Mapping[str, Any], place: str) -> JobRow:
    """Return a line's row, with an error for an unsupported field."""
    row_id, body = id_of(line["custom_id"], place), line["body"]
    wrong = _wrong(line)
    if wrong is not None:
        return JobRow(id=row_id, error=f"{place}: {wrong}")
    try:
        params = _params(body)
    except ValueError as error:
        return JobRow(id=row_id, error=f"{place}: {error}")
    return JobRow(
        id=row_id,
        messages=body["messages"],
        params=params,
        columns={"custom_id": row_id},
    )


def line_of_answer(record: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return an answer's line, without ``response`` if it failed."""
    number = f"{digest(str(record['id'])):016x}"
    line: dict[str, Any] = {
        "id": f"batch_req_{number}",
        "custom_id": record["id"],
        "response": None,
        "error": None,
    }
    if record["error"] is not None:
        return {**line, "error": _error_of(str(record["error"]))}
    answers = [record, *record.get("others", ())]
    prompt = record["usage"]["prompt_tokens"]
    completion = sum(one["usage"]["completion_tokens"] for one in answers)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": record["usage"]["cached_tokens"]},
    }
    body = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(record["created"]),
        "model": model,
        "choices": [_choice(index, one) for index, one in enumerate(answers)],
        "usage": usage,
        "system_fingerprint": None,
    }
    return {
        **line,
        "response": {"status_code": 200, "request_id": number, "body": body},
    }


def _error_of(error: str) -> dict[str, str]:
    """Return an error whose code is the name before its colon, if it has one."""
    kind, colon, message = error.partition(": ")
    if colon and kind.isidentifier():
        return {"code": kind, "message": message}
    return {"code": "error", "message": error}


def record_of_line(line: Mapping[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = {"id": line["custom_id"]}
    if error := line.get("error"):
        return {**record, "error": f"{error.get('code')}: {error.get('message')}"}
    body = line["response"]["body"]
    first, *others = (
        {"text": one["message"]["content"], "finish_reason": one["finish_reason"]}
        for one in body["choices"]
    )
    usage = {**body["usage"], **body["usage"].get("prompt_tokens_details", {})}
    return {
        **record,
        **first,
        "others": others,
        "error": None,
        "usage": usage,
        "created": body["created"],
    }


def _choice(index: int, answer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": answer["text"], "refusal": None},
        "logprobs": _logprobs(answer.get("logprobs")),
        "finish_reason": answer["finish_reason"],
    }


def _logprobs(steps: Sequence[Mapping[str, Any]] | None) -> dict[str, Any] | None:
    if steps is None:
        return None
    content = []
    for step in steps:
        chosen = _token(step["token_id"], step["logprob"])
        top = [_token(*one) for one in step["top"]]
        content.append({**chosen, "top_logprobs": top})
    return {"content": content, "refusal": None}


def _token(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None}


def _params(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a body. Raises ValueError."""
    params = {}
    for name, value in body.items():
        if name in _PARAMS and value is not None:
            ours = _PARAMS[name]
            params[ours] = _CONVERSIONS.get(ours, _as_it_is)(value)
    if params.get("json_schema", {}) is None:  # text
        del params["json_schema"]
    top = body.get("top_logprobs") or 0
    if body.get("logprobs"):
        params["logprobs"] = top
    elif top:
        raise ValueError("top_logprobs needs logprobs: true")
    return params


def _bias(given: Any) -> dict[int, Any]:
    """Return a bias by token ids, which JSON spells as text. Raises ValueError."""
    if not isinstance(given, dict):
        raise ValueError("logit_bias maps token ids to numbers")
    return {int(token): value for token, value in given.items()}


def _schema(given: Any) -> Mapping[str, Any] | None:
    """Return the schema of a ``response_format``; None for text. Raises ValueError."""
    written = _mapping(given)
    kind = written.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = _mapping(written.get("json_schema")).get("schema")
    if kind == "json_schema" and isinstance(schema, dict):
        return schema
    raise ValueError(
        "response_format is text, json_object, or json_schema with its schema"
    )


def _as_it_is(value: Any) -> Any:
    return value


_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "json_schema": _schema,
    "logit_bias": _bias,
}


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping as it is, and anything else as an empty one."""
    if isinstance(value, dict):
        return value
    return {}


def _wrong(line: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a line; None if nothing is."""
    wrong = _wrong_line(line)
    if wrong is not None:
        return wrong
    for name, value in line["body"].items():
        if name not in _KNOWN:
            hint = did_you_mean(name, _KNOWN)
            return f"body has {name!r}, which is not known here{hint}; leave it out"
        if value not in _ONLY.get(name, (value,)):
            return f"{name} is {value!r}, which is not done here; leave it out"
    return None


def _wrong_line(line: Mapping[str, Any]) -> str | None:
    strange = [name for name in line if name not in _LINE]
    if strange:
        hint = did_you_mean(strange[0], _LINE)
        return f"the line has {strange[0]!r} beside its body{hint}"
    asked = (line.get("method", "POST"), line.get("url", _URL))
    if asked != ("POST", _URL):
        return f"{asked[0]} {line.get('url')} is not answered here; POST {_URL} is"
    body = line["body"]
    messages = body.get("messages") if isinstance(body, dict) else None
    if isinstance(messages, list):
        return None
    return "body has no list of messages"
