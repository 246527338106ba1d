"""Responses that are kept: made in the background, shown, ended and deleted."""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vlm_batch.server.door import Core, entry_of
from vlm_batch.server.errors import ApiError, JsonResponse
from vlm_batch.server.exchange import GRACE, Exchange
from vlm_batch.server.kept import Kept
from vlm_batch.server.lists import listed
from vlm_batch.server.streams import SentEvents

logger = logging.getLogger("vlm_batch.server")


def following(kept: Kept, begin: int, seconds: float) -> Response:
    """Return a response's events from one on, as they come."""
    return SentEvents(b"", kept.follow(begin), seconds=seconds + GRACE)


def make_beside(exchange: Exchange, kept: Kept) -> None:
    """Make a response beside its connection, with the place in the queue and the bytes of its request."""
    responses = exchange.core.kept
    entry = exchange.entry = exchange.entry.detached()

    async def make() -> None:
        try:
            async for _ in exchange.stream():
                pass
        except ApiError as error:  # before the first event
            exchange.failed(error)
        except Exception:
            logger.exception("response %s ended in its middle", kept.id)
            exchange.failed(ApiError(500, "the server failed; its log has more"))

    def end(task: asyncio.Task[None]) -> None:
        if task.cancelled():
            kept.body["status"] = "cancelled"
        kept.running = None
        responses.release(kept)
        kept.wake()
        entry.said["background"] = kept.body["status"]
        entry.close()

    kept.body["status"] = "queued"
    kept.running = asyncio.create_task(make())
    kept.running.add_done_callback(end)
    responses.hold(kept)


def add_routes(app: FastAPI, core: Core) -> None:
    """Add the routes that show, end and delete what is kept."""

    async def find(response_id: str, request: HttpRequest) -> Kept:
        kept = await core.kept.find(response_id, entry_of(request).owner)
        if kept is None:
            raise ApiError(404, f"there is no response {response_id[:100]!r}")
        return kept

    @app.get("/v1/responses/{response_id}")
    async def show(
        response_id: str,
        request: HttpRequest,
        stream: bool = False,
        starting_after: int = -1,
    ) -> Response:
        """Return a response that is kept, or its events from one on."""
        kept = await find(response_id, request)
        if not stream:
            return JsonResponse(kept.body)
        if not kept.body["background"]:
            said = "only what was made in the background has events to follow"
            raise ApiError(400, said, param="stream")
        if kept.is_over and not kept.events:
            said = "its events are gone; what they told is in the response itself"
            raise ApiError(400, said, param="stream")
        seconds = core.service.config.request_seconds
        return following(kept, max(0, starting_after + 1), seconds)

    @app.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, request: HttpRequest) -> Response:
        """Forget a response, and end it if it is being made."""
        kept = await find(response_id, request)
        kept.cancel()
        core.kept.forget(kept)
        gone = {"id": response_id, "object": "response.deleted", "deleted": True}
        return JsonResponse(gone)

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str, request: HttpRequest) -> Response:
        """End a response that is made in the background."""
        kept = await find(response_id, request)
        if not kept.body["background"]:
            raise ApiError(400, "only what is made in the background can be cancelled")
        if kept.running is not None:
            kept.running.cancel()
            await asyncio.gather(kept.running, return_exceptions=True)
        return JsonResponse(kept.body)

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        response_id: str,
        request: HttpRequest,
        limit: int = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """List what came in with a response."""
        items = (await find(response_id, request)).items
        return listed(items, order, after, max(1, min(100, limit)))
