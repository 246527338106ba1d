"""Errors in OpenAI's envelope."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from vlm_batch.errors import InvalidRequest, PromptTooLong
from vlm_batch.server.fields import ALIASES, SAMPLING, TEMPLATE
from vlm_batch.server.wire import field_names
from vlm_batch.types import Result

#: Absolute paths, which tell strangers about this machine; not those of URLs.
_PATH = re.compile(r"(?<![\w:/.])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\:'\",;()<>]+){2,}")
_FILE = re.compile(r"file://\S+")
_SLASHES = re.compile(r"[/\\]+")
#: The library's field names -> the wire's.
_ON_THE_WIRE = {
    ours: wire for wire, ours in {**SAMPLING, **TEMPLATE}.items() if wire not in ALIASES
}
_ON_THE_WIRE |= {name: name for name in ("tools", "min_pixels", "max_pixels")}
_ON_THE_WIRE["token_ids"] = "prompt"
_FIELDS = re.compile(r"(?:(?:, | and )?\b(?:" + "|".join(_ON_THE_WIRE) + r")\b)+")
#: Most characters of a message.
MAX_MESSAGE = 600

#: OpenAI's error types by status; others depend on 4xx or 5xx.
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


#: Statuses whose messages quote what a client or a model wrote.
_QUOTING = frozenset({400, 404, 405, 500})


def _known_place(param: str) -> str:
    """Return a field's place with question marks for names that are the client's own."""

    def shown(match: re.Match[str]) -> str:
        name = match[0]
        return name if name.isdecimal() or name in field_names() else "?"

    return re.sub(r"[^.\[\]]+", shown, param)


class JsonResponse(JSONResponse):
    """JSON, lone surrogates as question marks."""

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def json_bytes(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


class ApiError(HTTPException):
    """An error response: status, message, field (``param``).

    ``whole`` is the library's message with its paths.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        whole: str | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self._whole = whole
        self.param = param
        self.code = code

    def rename(self, names: Mapping[str, str]) -> None:
        """Say the fields that the client sent, in place of others for the same."""
        if self.param is None or self.param not in names:
            return
        words = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")

        def renamed(message: str) -> str:
            begin, colon, rest = message.partition(":")
            return words.sub(lambda match: names[match[0]], begin) + colon + rest

        self.param = names[self.param]
        self.detail = renamed(str(self.detail))
        self._whole = None if self._whole is None else renamed(self._whole)

    def quote(self, sent: bytes) -> None:
        """Restore the message's paths that the client ``sent``."""
        if self._whole is not None:
            advice = str(self.detail).removeprefix(without_paths(self._whole))
            self.detail = without_paths(self._whole, sent) + advice

    @property
    def reason(self) -> str:
        """The log's reason, in which no word of a request or an answer stands."""
        if self.status_code not in _QUOTING:
            return str(self.detail)
        kind = self.code or _type_of(self.status_code)
        return kind if self.param is None else f"{_known_place(self.param)}: {kind}"

    @property
    def body(self) -> dict[str, Any]:
        return envelope(self.status_code, str(self.detail), self.param, self.code)


def _type_of(status: int) -> str:
    others = "invalid_request_error" if status < 500 else "server_error"
    return _TYPES.get(status, others)


def envelope(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error as OpenAI writes it."""
    kind = _type_of(status)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


#: Writes an error of a request, which has an id, in a door's form.
Envelope: TypeAlias = Callable[[ApiError, str], dict[str, Any]]


def openai_envelope(error: ApiError, request_id: str) -> dict[str, Any]:
    return error.body


def refusal(error: InvalidRequest) -> ApiError:
    """Return 400 for library refusals, with the wire's field names."""
    text, param = error.reason, None
    if fields := _FIELDS.match(text):
        names = [
            _ON_THE_WIRE[name]
            for name in re.findall(r"\w+", fields[0])
            if name != "and"
        ]
        text, param = " and ".join(names) + text[fields.end() :], names[0]
    instead = (
        "; text that is final already goes to /v1/completions"
        if "template=None" in error.advice
        else ""
    )
    code = (
        "context_length_exceeded"
        if isinstance(error, PromptTooLong)
        else type(error).__name__
    )
    return ApiError(
        400, without_paths(text) + instead, param=param, code=code, whole=text
    )


@contextmanager
def refusing() -> Iterator[None]:
    """Raise ApiError 400 for what the library refuses."""
    try:
        yield
    except InvalidRequest as error:
        raise refusal(error) from error


def failure(result: Result) -> ApiError:
    """Return 400 if the request was at fault, else 500."""
    if isinstance(result.exception, InvalidRequest):
        return refusal(result.exception)
    return ApiError(
        500,
        f"the engine could not finish this request: {without_paths(result.error or 'unknown')}",
    )


def without_paths(message: str, sent: bytes = b"") -> str:
    """Return a message in one bounded line, without paths not ``sent`` by the client.

    Slashes do not count: JSON and messages double some.
    """
    known = None

    def shown_for(match: re.Match[str], instead: str) -> str:
        nonlocal known
        known = (
            _SLASHES.sub("", sent.decode("utf-8", "replace"))
            if known is None
            else known
        )
        found = match[0].rstrip(".")
        forms = [
            _SLASHES.sub("", form) for form in (found, json.dumps(found)[1:-1])
        ]  # JSON may spell a character in two ways
        return match[0] if any(form in known for form in forms) else instead

    line = _FILE.sub(
        lambda match: shown_for(match, "(a file)"), " ".join(message.split())
    )
    line = _PATH.sub(lambda match: shown_for(match, "(a path)"), line)
    return bounded(line)


def bounded(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
