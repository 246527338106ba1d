"""OpenAI's batch form.

A request is ``{"custom_id", "method", "url", "body"}``, an answer ``{"id", "custom_id", "response": {"status_code",
"request_id", "body"}, "error"}``. Source: OpenAI's API reference, batch request input and output objects.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        kind, colon, message = str(record["error"]).partition(": ")
        code, message = (
            (kind, message)
            if colon and kind.isidentifier()
            else ("error", str(record["error"]))
        )
        return {**line, "error": {"code": code, "message": message}}
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
    steps = answer.get("logprobs")
    content = steps and [
        {
            **_token(step["token_id"], step["logprob"]),
            "top_logprobs": [_token(*one) for one in step["top"]],
        }
        for step in steps
    ]
    return {
        "index": index,
        "message": {"role": "assistant", "content": answer["text"], "refusal": None},
        "logprobs": None if steps is None else {"content": content, "refusal": None},
        "finish_reason": answer["finish_reason"],
    }


def _token(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None}


def _params(body: Mapping[str, Any]) -> dict[str, Any]:
    params = {}
    for name, value in body.items():
        if name in _PARAMS and value is not None:
            params[_PARAMS[name]] = value
    if "json_schema" in params:
        params["json_schema"] = _schema(params["json_schema"])
        if params["json_schema"] is None:
            del params["json_schema"]
    bias = params.get("logit_bias", {})
    if not isinstance(bias, dict):
        raise ValueError("logit_bias maps token ids to numbers")
    if bias:
        params["logit_bias"] = {int(token): value for token, value in bias.items()}
    if body.get("logprobs"):
        params["logprobs"] = body.get("top_logprobs") or 0
    elif body.get("top_logprobs"):
        raise ValueError("top_logprobs needs logprobs: true")
    return params


def _schema(given: Any) -> Mapping[str, Any] | None:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    named = given.get("json_schema") if kind == "json_schema" else None
    schema = named.get("schema") if isinstance(named, dict) else None
    if isinstance(schema, dict):
        return schema
    raise ValueError(
        "response_format is text, json_object, or json_schema with its schema"
    )


def _wrong(line: Mapping[str, Any]) -> str | None:
    body = line["body"]
    for name in line:
        if name not in _LINE:
            return f"the line has {name!r} beside its body{did_you_mean(name, _LINE)}"
    method, url = line.get("method", "POST"), line.get("url", "/v1/chat/completions")
    if method != "POST" or url != "/v1/chat/completions":
        return f"{method} {line.get('url')} is not answered here; POST /v1/chat/completions is"
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        return "body has no list of messages"
    for name, value in body.items():
        if name in _ONLY and value not in _ONLY[name]:
            return f"{name} is {value!r}, which is not done here; leave it out"
        if name not in _KNOWN:
            return f"body has {name!r}, which is not known here{did_you_mean(name, _KNOWN)}; leave it out"
    return None
