"""The server's edge: checks on every request, and the access log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlm_batch.server.config import Key, ServerConfig
from vlm_batch.server.errors import (
    ApiError,
    Envelope,
    JsonResponse,
    openai_envelope,
)
from vlm_batch.server.metrics import Metrics

if TYPE_CHECKING:
    from vlm_batch.server.door import Doors

logger = logging.getLogger("vlm_batch.server")
access = logging.getLogger("vlm_batch.server.access")

#: Scope key of a request's ``Entry``.
ENTRY = "vlm_batch.entry"
#: Most seconds for a body to arrive.
BODY_SECONDS = 60.0
#: Most seconds for the rest of a refused body to arrive, and for silence in it. A socket that closes before that resets
#: the connection, and the client, still sending, sees "broken pipe" in place of the answer.
LINGER_SECONDS, LINGER_SILENCE = 30.0, 5.0
#: Most commas, and most opening brackets, in a body: each costs checking time on the event loop. Base64 has none.
MAX_VALUES, MAX_NESTED = 2**18, 2**16
#: The part of the bytes of waiting requests that one client may have.
PART_OF_CLIENT = 3 / 4
#: Retry-After while other requests' bodies take the room.
RETRY = 1
#: Paths without a key: health checks, and the page, which asks for the key.
OPEN = frozenset({"/", "/health", "/ready"})
OPEN_FOLDER = "/page/"
#: Where files are sent, which are no JSON.
UPLOADS = "/v1/files"
#: Most open requests, waiting ones included.
MAX_REQUESTS = 2048

_SAFE_ID = re.compile(r"[\w.:-]{1,128}")
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob: data:; "
    "frame-ancestors 'none'; base-uri 'self'; form-action 'none'",
}


class NoRoom(ApiError):
    """A request's bytes have no room beside those of others."""


class ByteQuota:
    """Bytes of unanswered requests: ``most`` of all, and of one client what its part allows."""

    def __init__(self, most: int, largest: int = 0) -> None:
        self._most = most
        self._most_of_client = max(int(most * PART_OF_CLIENT), largest)
        self.size = 0
        self._of: Counter[int] = Counter()

    def acquire(self, size: int, client: int) -> None:
        is_full = (
            self.size + size > self._most
            or self._of[client] + size > self._most_of_client
        )
        if self._most and is_full:
            raise NoRoom(
                429,
                f"requests that wait hold {self.size} bytes of {self._most}; try again in {RETRY} s",
                code="busy",
                headers={"Retry-After": str(RETRY), "Connection": "close"},
            )
        self.size += size
        self._of[client] += size

    def release(self, size: int, client: int) -> None:
        self.size -= size
        self._of[client] -= size
        if not self._of[client]:
            del self._of[client]


@dataclass
class Entry:
    """One line of the access log; ``said`` holds what routes add."""

    request_id: str
    method: str
    path: str
    client: str
    held: ByteQuota
    number: int = 0  # the client's, as the engine knows it
    owner: str = ""  # whose files it may name: its key's, or its address's
    has_priority: bool = False  # whether it may say which of its requests go first
    began: float = field(default_factory=time.perf_counter)
    status: int = 0
    said: dict[str, Any] = field(default_factory=dict)
    num_held: int = 0
    num_bytes: int = 0  # of the body
    # commas and opening brackets of the body, for the cost of reading it
    num_values: int = 0
    num_nested: int = 0
    sent: bytes = field(default=b"", repr=False)  # the body, until the answer begins
    envelope: Envelope = field(default=openai_envelope, repr=False)
    visit: Any = None  # the place in the queue, once there is one
    at_end: Callable[[], None] | None = None  # gives it back

    def hold(self, size: int) -> None:
        """Count bytes until the answer. Raises ApiError 429."""
        self.held.acquire(size, self.number)
        self.num_held += size

    def detached(self) -> Entry:
        """Return an entry for what goes on after the answer: the place and the bytes are its own, until ``close``."""
        other = replace(self, said=dict(self.said))
        self.num_held, self.visit, self.at_end = 0, None, None
        return other

    def release(self) -> None:
        """Give the bytes back."""
        self.held.release(self.num_held, self.number)
        self.num_held = 0

    def close(self) -> None:
        """Give the place and the bytes back, and write the line of the log."""
        self.release()
        if self.at_end is not None:
            self.at_end()
        access.info(self.line())

    def response_to(self, error: ApiError) -> JsonResponse:
        """Return an error in the form of this request's door."""
        body = self.envelope(error, self.request_id)
        return JsonResponse(body, error.status_code, error.headers)

    def line(self) -> str:
        seconds = round(time.perf_counter() - self.began, 6)
        fixed = {
            "request_id": self.request_id,
            "client": self.client,
            "method": self.method,
            "path": self.path,
        }
        return json.dumps(
            {**fixed, "status": self.status, "seconds": seconds, **self.said}
        )


class Edge:
    """ASGI middleware for request ids, ``Host``, keys, bodies and the access log."""

    def __init__(
        self, app: ASGIApp, config: ServerConfig, metrics: Metrics, doors: Doors
    ) -> None:
        self._app = app
        self._doors = doors
        self._config = config
        self._metrics = metrics
        self._held = ByteQuota(config.max_held, config.max_body)
        self._num_open = 0
        keys = [
            *([] if config.api_key is None else [Key(config.api_key)]),
            *config.keys,
        ]
        self._keys = [(_digest(key.text.encode()), key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # for the routes: the path may have it or not
        root = self._config.root_path
        scope = {**scope, "root_path": root}
        if root and scope["path"] == root:  # the page, typed without its last slash
            scope["path"] = f"{root}/"
        headers = Headers(scope=scope)
        client = scope["client"][0] if scope["client"] else ""
        given = headers.get("x-request-id", "")
        request_id = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        path, method = _path_of(scope), scope["method"]
        entry = Entry(request_id, method, path, client, self._held)
        entry.envelope = self._doors.envelope(path)
        scope = {**scope, ENTRY: entry}
        if method == "HEAD":  # served as GET; uvicorn leaves out the body
            scope["method"] = "GET"
        self._num_open += 1

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                ids = {"x-request-id": request_id, "request-id": request_id}
                MutableHeaders(raw=message["headers"]).update({**ids, **_HEADERS})
            await send(message)

        is_upload = method == "POST" and path == UPLOADS
        body = _Body(receive, self._config.max_body, entry)
        if is_upload:
            body = _Upload(receive, self._config.max_upload, entry)
        lingering = body.linger(sending, expects="expect" in headers)
        try:
            key = self._check(scope, headers)
            entry.has_priority = key is not None and key.has_priority
            entry.number = _number(client)
            if key in self._config.keys:
                entry.number = self._config.keys.index(key)
            entry.owner = _owner(key, entry.number)
            await self._app(scope, body.receive, lingering)
        except Exception as error:
            answer = _answer_to(error, entry)
            # half an answer is out: all that is left is to close the connection
            if entry.status:
                raise
            await entry.response_to(answer)(scope, receive, lingering)
        finally:
            self._num_open -= 1
            route = scope.get("route")  # what strangers make up is no label of a metric
            self._metrics.responded(
                "other" if route is None else str(route.path), entry.status
            )
            entry.close()

    def _check(self, scope: Scope, headers: Headers) -> Key | None:
        """Return the request's key, if needed. Raises ApiError for what is refused before its body is read."""
        hosts = self._config.hosts
        if hosts is not None and _host(headers.get("host", "")) not in hosts:
            said = "this server does not answer under that host name"
            raise ApiError(403, f"{said} (--allowed-host adds one)")
        path = _path_of(scope)
        is_open = path in OPEN or path.startswith(OPEN_FOLDER)
        found = None if is_open or not self._keys else self._key_of(headers)
        # those who ask whether the server lives are told
        if self._num_open > MAX_REQUESTS and path not in OPEN:
            said = "too many requests are open; try again in 5 s"
            raise ApiError(503, said, code="busy", headers={"Retry-After": "5"})
        # two readers of it may see two requests
        if "transfer-encoding" in headers and "content-length" in headers:
            wrong = "the body has a Content-Length beside a Transfer-Encoding; send one"
            raise ApiError(400, wrong, headers={"Connection": "close"})
        if scope["method"] == "POST" and self._doors.at(path) is not None:
            self._check_body(headers)
        return found

    def _key_of(self, headers: Headers) -> Key:
        """Return the key that a request has. Raises ApiError 401."""
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            given = headers.get("x-api-key", "")  # Anthropic's
        said = _digest(given.strip().encode("latin-1"))
        known = [key for digest, key in self._keys if hmac.compare_digest(said, digest)]
        if known:
            return known[-1]
        raise ApiError(
            401,
            "a valid API key is needed: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _check_body(self, headers: Headers) -> None:
        """Raise ApiError for a body that is no JSON, or too large by its own word."""
        # Pages of other sites can post forms and plain text without being asked back, but not JSON.
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            said = "the body must be JSON, with Content-Type: application/json"
            raise ApiError(415, said)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._config.max_body:
            raise _too_large(self._config.max_body)


class _Body:
    """A ``receive`` with limits on bytes, values and time."""

    def __init__(self, receive: Receive, max_bytes: int, entry: Entry) -> None:
        self._receive = receive
        self._entry = entry
        self._max_bytes = max_bytes
        self._is_whole = False
        self._until = time.monotonic() + BODY_SECONDS

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()
        try:
            message = await asyncio.wait_for(
                self._receive(), max(0.0, self._until - time.monotonic())
            )
        except asyncio.TimeoutError as error:
            raise ApiError(
                408,
                f"the body did not arrive within {BODY_SECONDS:.0f} s; send it again, or less",
            ) from error
        body = message.get("body", b"")
        entry = self._entry
        entry.num_bytes += len(body)
        entry.num_values += body.count(b",")
        entry.num_nested += body.count(b"[") + body.count(b"{")
        self._is_whole = message["type"] != "http.request" or not message.get(
            "more_body", False
        )
        if entry.num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        entry.hold(len(body))
        if entry.num_values > MAX_VALUES or entry.num_nested > MAX_NESTED:
            said = (
                f"more than {MAX_VALUES:,} commas, or {MAX_NESTED:,} lists and objects"
            )
            raise ApiError(
                413, f"the body holds {said}", headers={"Connection": "close"}
            )
        return message

    def linger(self, send: Send, *, expects: bool) -> Send:
        """Return a ``send`` that ends an answer which closes the connection when the client has sent its body.

        Or when it takes too long to. One that ``expects`` to be told "100 Continue" sends nothing before that.
        """
        closes = False

        async def lingering(message: Message) -> None:
            nonlocal closes
            if message["type"] == "http.response.start":
                closes = "connection" in Headers(raw=message["headers"])
            is_last = message["type"] == "http.response.body" and not message.get(
                "more_body"
            )
            was_told = not expects or self._entry.num_bytes > 0
            if not (is_last and closes and was_told):
                await send(message)
                return
            # the client can read all of the answer from here on
            await send({**message, "more_body": True})
            self._entry.release()
            await self._discard()
            await send({"type": "http.response.body"})

        return lingering

    async def _discard(self) -> None:
        until = time.monotonic() + LINGER_SECONDS
        while not self._is_whole:
            seconds = min(LINGER_SILENCE, until - time.monotonic())
            try:
                message = await asyncio.wait_for(self._receive(), max(0.0, seconds))
            except asyncio.TimeoutError:
                return
            self._is_whole = not message.get("more_body", False)


class _Upload(_Body):
    """A ``receive`` of bytes that go to the disk: none are held, and it may take as long as they come."""

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), BODY_SECONDS)
        except asyncio.TimeoutError as error:
            said = f"nothing of the file came for {BODY_SECONDS:.0f} s; send it again"
            raise ApiError(408, said) from error
        is_part = message["type"] == "http.request"
        self._is_whole = not (is_part and message.get("more_body", False))
        self._entry.num_bytes += len(message.get("body", b""))
        if self._entry.num_bytes > self._max_bytes:
            said = f"the file is larger than {self._max_bytes:,} bytes (the server's --max-upload-mb)"
            raise ApiError(413, said, headers={"Connection": "close"})
        return message


def _answer_to(error: Exception, entry: Entry) -> ApiError:
    """Answer an exception; log a defect's trace."""
    if isinstance(error, ApiError):
        entry.said["error"] = error.reason
        return error
    entry.said["error"] = type(error).__name__
    logger.error("request %s: %s", entry.request_id, error, exc_info=error)
    return ApiError(
        500, f"the server failed; its log has more under {entry.request_id}"
    )


def _too_large(most: int) -> ApiError:
    said = f"the body is larger than {most:,} bytes; send fewer or smaller media (the server's --max-body-mb)"
    return ApiError(413, said, headers={"Connection": "close"})


def _path_of(scope: Scope) -> str:
    """Return a request's path without the one under which a proxy shows the server, if the proxy has left that."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _host(header: str) -> str:
    host, _, port = header.rpartition(":")
    return (host if host and port.isdecimal() else header).lower()


def _number(address: str) -> int:
    """Number an address or IPv6 /64 as a client, after the keys."""
    try:
        host = ipaddress.ip_address(address)
        address = str(
            host
            if host.version == 4
            else ipaddress.ip_network((host, 64), strict=False)
        )
    except ValueError:
        pass  # no address: a socket of the system's
    return (1 << 32) + int.from_bytes(_digest(address.encode())[:8], "big")


def _owner(key: Key | None, number: int) -> str:
    """Return whose files a request may name, the same in every process: those of its key, or of its address."""
    name = f"address {number}" if key is None else f"key {key.text}"
    return _digest(name.encode()).hex()[:32]


def _digest(key: bytes) -> bytes:
    """Hash a key, for comparison in constant time."""
    return hashlib.sha256(key).digest()
