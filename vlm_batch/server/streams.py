"""Responses that end when their reader leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlm_batch.inputs.fetch import OperationCancelled
from vlm_batch.server.edge import ENTRY
from vlm_batch.server.errors import ApiError

Answer = TypeVar("Answer")
Value = TypeVar("Value")


async def unless_left(
    request: HttpRequest, work: Coroutine[Any, Any, Answer]
) -> Answer:
    """Await ``work``; cancel it if the client leaves."""
    working = asyncio.ensure_future(work)
    if await _ends(working, request.receive):
        return working.result()
    raise ApiError(499, "the client left")


async def finished(running: Future[Value]) -> Value:
    """Await a call that runs on a thread; it runs on if this is cancelled, and is cancelled if the server stops."""
    try:
        return await asyncio.shield(asyncio.wrap_future(running))
    except OperationCancelled:
        raise asyncio.CancelledError from None


class SentEvents(Response):
    """Server-sent events; a reader that leaves or exceeds ``seconds`` ends their source."""

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes], *, seconds: float
    ) -> None:
        self.status_code = 200
        self.background = None
        self._first = first
        self._rest = rest
        self._seconds = seconds
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        try:
            if await _ends(sending, receive, self._seconds):
                sending.result()
            else:
                scope[ENTRY].said["left"] = True
        finally:
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        """Send with backpressure: ``send`` waits for slow readers."""
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await send(
            {"type": "http.response.body", "body": self._first, "more_body": True}
        )
        async for chunk in self._rest:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _ends(
    working: asyncio.Future[Any], receive: Receive, seconds: float | None = None
) -> bool:
    """Whether ``working`` ends before the client leaves and ``seconds`` pass; else it is cancelled."""
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait(
            (working, leaving), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        return working.done()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
