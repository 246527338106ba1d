"""Reads the bodies of requests: small ones at once, large ones on a thread beside the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.responses import Response

from vlm_batch.server.errors import ApiError, without_paths
from vlm_batch.server.openai import REFUSED
from vlm_batch.server.wire import ChatRequest, CompletionRequest, Wire

#: Bytes up to which a body is read on the event loop: another thread would take longer.
SMALL = 2**15
#: Parts of a field's place in the body that a message shows.
MAX_DEPTH_SHOWN = 12
KINDS: Mapping[str, type[Wire]] = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}

Value = TypeVar("Value")


class Bodies:
    """Calls that take as long as a body is large. Large bodies take turns on one thread, and nobody else waits for them.

    Parsers in C keep Python's lock until they are done, and the event loop lets go of it whenever it reads from a connection.
    So the thread rests after each call for as long as that took: else every step of the loop would wait for another body.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "vlm-batch-bodies")
        self._rests_until = 0.0

    async def read(self, size: int, call: Callable[..., Value], *given: Any) -> Value:
        """The outcome of a call for a body of ``size`` bytes."""
        if size <= SMALL:
            return call(*given)
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._after_rest, call, *given)

    def _after_rest(self, call: Callable[..., Value], *given: Any) -> Value:
        time.sleep(max(0.0, self._rests_until - time.monotonic()))
        begin = time.monotonic()
        try:
            return call(*given)
        finally:
            now = time.monotonic()
            self._rests_until = now + (now - begin)

    def close(self) -> None:
        """Begin nothing more."""
        self._worker.shutdown(wait=False, cancel_futures=True)


class BodyRoute(APIRoute):
    """A route whose body is parsed and checked by ``Bodies``, the application's ``state.bodies``."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handle_read(request: Request) -> Response:
            answer: Response = await handle(_Read(request.scope, request.receive))
            return answer

        return handle_read


class _Read(Request):
    async def json(self) -> Any:
        """The body, checked. Raises ApiError."""
        body = await self.body()
        bodies: Bodies = self.app.state.bodies
        return await bodies.read(len(body), read_body, body, KINDS[self.scope["path"]])


def read_body(data: bytes, kind: type[Wire]) -> Wire:
    """A body of one kind. Raises ApiError."""
    try:
        body = json.loads(data)
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    except ValueError as error:
        raise ApiError(400, "the body is not JSON", code="json_invalid") from error
    try:
        return kind.model_validate(body)
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    except ValidationError as error:
        wrong = _wrong(error, body)
    del body  # not to be let go of by the event loop, with the error
    raise wrong


def _wrong(error: ValidationError, body: Any) -> ApiError:
    """The first thing that is wrong with a body, at the place where the client wrote it."""
    first = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))  # of a value's forms, the nearest
    where = _place(first["loc"], body, is_missing=first["type"] == "missing")
    name, message, param = str(first["loc"][-1]) if first["loc"] else "", str(first["msg"]), where[:200] or None
    if first["type"] == "extra_forbidden":
        message = f"{name} is not supported: {REFUSED[name]}" if name in REFUSED else f"there is no field {name}"
    return ApiError(400, without_paths(f"{param}: {message}" if param else message), param=param, code=first["type"])


def _place(parts: tuple[int | str, ...], body: Any, *, is_missing: bool) -> str:
    """A place as a client would write it, ``messages[0].content``: pydantic's names the forms of a value as well."""
    found: list[str] = []
    for part in parts:
        if isinstance(body, dict) and part in body:
            found.append(f".{part}")
        elif isinstance(body, list) and isinstance(part, int):
            found.append(f"[{part}]")
        else:
            continue
        body = body[part]
    if is_missing:
        found.append(f".{parts[-1]}")
    if len(found) > MAX_DEPTH_SHOWN:
        found = [*found[: MAX_DEPTH_SHOWN - 1], "..."]
    return "".join(found).lstrip(".")
