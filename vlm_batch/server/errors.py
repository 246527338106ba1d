"""Errors on the wire: one exception with its HTTP status, in OpenAI's envelope."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from vlm_batch.errors import InvalidRequest, PromptTooLong
from vlm_batch.server.wire import SAMPLING, TEMPLATE
from vlm_batch.types import Result

#: Absolute paths of two folders or more, which tell a stranger about this machine; not the path of a URL.
_PATH = re.compile(r"(?<![\w:/.])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\:'\",;()<>]+){2,}")
_FILE = re.compile(r"file://\S+")
#: The library's names of fields, and the wire's.
_ON_THE_WIRE = {ours: wire for wire, ours in {**SAMPLING, **TEMPLATE}.items()} | {"token_ids": "prompt"}
_FIELDS = re.compile(r"(?:(?:, | and )?\b(?:" + "|".join(_ON_THE_WIRE) + r")\b)+")
#: The most characters of an exception's text that a client gets.
MAX_MESSAGE = 600

#: OpenAI's names of errors; others are the client's or the server's by their status.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    499: "client_left",
    503: "unavailable_error",
    504: "timeout_error",
}


class JsonResponse(JSONResponse):
    """JSON in which half of a surrogate pair is a question mark: clients may send one, and then get it back in a message."""

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def json_bytes(value: Any) -> bytes:
    """A value as JSON in UTF-8, whatever its texts hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


class ApiError(HTTPException):
    """An answer other than 200: its status, a sentence, and the field (``param``) that it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The envelope that OpenAI's clients read."""
        return envelope(self.status_code, str(self.detail), self.param, self.code)


def envelope(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """``{"error": {...}}`` as OpenAI's clients read it."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(error: InvalidRequest) -> ApiError:
    """400, for what the library refuses, in the words of the wire: its fields' names, and no advice to users of the library."""
    text, param = error.reason, None
    if fields := _FIELDS.match(text):
        names = [_ON_THE_WIRE[name] for name in re.findall(r"\w+", fields[0]) if name != "and"]
        text, param = " and ".join(names) + text[fields.end() :], names[0]
    instead = "; text that is final already goes to /v1/completions" if "template=None" in error.advice else ""
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else type(error).__name__
    return ApiError(400, without_paths(text) + instead, param=param, code=code)


def failure(result: Result) -> ApiError:
    """The answer for a request that the engine ended with an error: 400 if the request was at fault, else 500."""
    if isinstance(result.exception, InvalidRequest):
        return refusal(result.exception)
    return ApiError(500, f"the engine could not finish this request: {without_paths(result.error or 'unknown')}")


def without_paths(message: str) -> str:
    """A message for strangers: one line, no absolute path, of bounded length."""
    line = _PATH.sub("(a path)", _FILE.sub("(a file)", " ".join(message.split())))
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…"
