"""``/v1/batches``: OpenAI's batches, over files of requests to the other doors."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vlm_batch.server.batches import Batches, BatchRun, Endpoints
from vlm_batch.server.door import Core, Door, entry_of
from vlm_batch.server.doors.chat import ChatExchange, ChatRequest
from vlm_batch.server.doors.completions import CompletionRequest, TextExchange
from vlm_batch.server.doors.files import age_of, store_of
from vlm_batch.server.doors.responses import InputRequest, ResponseExchange
from vlm_batch.server.errors import ApiError, JsonResponse
from vlm_batch.server.lists import listed
from vlm_batch.server.private import AGE, new_id
from vlm_batch.server.wire import Body, Metadata, Wire

PATH = "/v1/batches"
#: What rows may ask.
ENDPOINTS: Endpoints = {
    "/v1/chat/completions": (ChatRequest, ChatExchange),
    "/v1/completions": (CompletionRequest, TextExchange),
    "/v1/responses": (InputRequest, ResponseExchange),
}
HOUR = 3600


class OutputAge(Wire):
    anchor: Literal["created_at"]
    seconds: int


class BatchRequest(Body):
    """The body of ``POST /v1/batches``."""

    nothing = {"model": (), "stream": ()}
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,2}h$")]
    output_expires_after: OutputAge | None = None
    metadata: Metadata | None = None


def batches_of(request: HttpRequest, core: Core) -> Batches:
    """Return the server's batches. Raises ApiError 404 if it has none."""
    store_of(core)
    found: Batches = request.app.state.batches
    return found


async def create(core: Core, body: BatchRequest, request: HttpRequest) -> Response:
    """Begin a batch."""
    batches, entry = batches_of(request, core), entry_of(request)
    core.check_model(body.model)
    store = store_of(core)
    given = store.find(body.input_file_id, entry.owner, param="input_file_id")
    if given.shown["purpose"] != "batch":
        said = f"the file's purpose is {given.shown['purpose']!r}, not 'batch'"
        raise ApiError(400, said, param="input_file_id")
    run = BatchRun(entry.owner, entry.number, _new(core, body))
    if body.output_expires_after is not None:
        seconds = body.output_expires_after.seconds
        run.age = age_of(seconds, "output_expires_after.seconds")
    batches.create(run)
    entry.said["batch"] = run.id
    return JsonResponse(run.shown)


def _new(core: Core, body: BatchRequest) -> dict[str, Any]:
    now = int(time.time())
    hours = int(body.completion_window.removesuffix("h"))
    if hours * HOUR > AGE:
        said = f"completion_window is at most {AGE // HOUR}h"
        raise ApiError(400, said, param="completion_window")
    times = ("in_progress", "finalizing", "completed", "failed", "expired")
    states = (*times, "cancelling", "cancelled")
    return {
        "id": new_id("batch"),
        "object": "batch",
        "endpoint": body.endpoint,
        "model": core.service.config.name,
        "errors": None,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + hours * HOUR,
        **{f"{state}_at": None for state in states},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": None,
        "metadata": body.metadata,
    }


def add_routes(app: FastAPI, core: Core) -> None:
    """Add the paths that show and end batches."""

    def find(batch_id: str, request: HttpRequest) -> BatchRun:
        batches = batches_of(request, core)
        return batches.find(batch_id, entry_of(request).owner)

    @app.get(PATH)
    async def batches(
        request: HttpRequest, limit: int = 20, after: str | None = None
    ) -> Response:
        """List batches, the newest first."""
        mine = batches_of(request, core).of(entry_of(request).owner)
        shown = [run.shown for run in mine]
        return listed(shown, "desc", after, max(1, min(100, limit)))

    @app.get(f"{PATH}/{{batch_id}}")
    async def batch(batch_id: str, request: HttpRequest) -> Response:
        """Describe a batch: its state, counts and files."""
        return JsonResponse(find(batch_id, request).shown)

    @app.post(f"{PATH}/{{batch_id}}/cancel")
    async def cancel(batch_id: str, request: HttpRequest) -> Response:
        """End a batch; what was answered stays."""
        run = find(batch_id, request)
        batches_of(request, core).cancel(run)
        return JsonResponse(run.shown)


BATCHES = Door(
    path=PATH,
    body=BatchRequest,
    answer=create,
    about="Answer a file of requests, while nobody else needs the model.",
    routes=add_routes,
)
