"""Routes that show, end and delete responses that are kept."""

from __future__ import annotations

import asyncio
from typing import Literal

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vlm_batch.server.door import Core, entry_of
from vlm_batch.server.errors import ApiError, JsonResponse
from vlm_batch.server.exchange import GRACE
from vlm_batch.server.kept import Kept
from vlm_batch.server.streams import SentEvents


def following(kept: Kept, begin: int, seconds: float) -> Response:
    """Return a response's events from one on, as they come."""
    return SentEvents(b"", kept.follow(begin), seconds=seconds + GRACE)


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
        if kept.running is not None:
            kept.running.cancel()
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
        items = list((await find(response_id, request)).items)
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        begin = ids.index(after) + 1 if after in ids else 0
        shown = items[begin : begin + max(1, min(100, limit))]
        ends = {"first_id": None, "last_id": None}
        if shown:
            ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]}
        has_more = begin + len(shown) < len(items)
        found = {"object": "list", "data": shown, **ends, "has_more": has_more}
        return JsonResponse(found)
