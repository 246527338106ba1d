"""The application: routes, and errors in one form."""

from __future__ import annotations

import asyncio
import html
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException

from vlm_batch._version import __version__
from vlm_batch.errors import InvalidRequest
from vlm_batch.server.batches import Batches
from vlm_batch.server.bodies import Bodies, BodyRoute
from vlm_batch.server.door import Core, Door, entry_of
from vlm_batch.server.doors import DOORS, files
from vlm_batch.server.doors.batches import ENDPOINTS
from vlm_batch.server.edge import Edge
from vlm_batch.server.errors import ApiError, JsonResponse, refusal
from vlm_batch.server.kept import KeptResponses, ResponseFolder
from vlm_batch.server.media import MediaReader
from vlm_batch.server.service import Service
from vlm_batch.server.stored import FileStore

#: Endpoints of other servers, and the alternative here.
NOT_SERVED = {
    "/v1/embeddings": "no family here makes embeddings",
    "/v1/realtime": "python -m vlm_batch.integrations.mlx_vlm serves it with the same engine",
    "/v1/audio": "recordings go into chats, as input_audio; nothing is spoken here",
    "/v1/images": "no family here makes pictures",
    "/v1/moderations": "nothing is moderated here",
    "/v1/rerank": "no family here ranks",
}

PAGE = {
    "app.js": "text/javascript",
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
}


def create_app(service: Service, media: MediaReader) -> FastAPI:
    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        sweeping = asyncio.create_task(core.kept.sweep())
        if batches is not None:
            batches.start()
        try:
            yield
        finally:
            sweeping.cancel()
            core.kept.close()
            if batches is not None:
                await batches.close()
            await service.stop()
            if core.files is not None:
                core.files.close()
            media.close()
            app.state.bodies.close()

    app = FastAPI(
        title="vlm-batch",
        version=__version__,
        lifespan=life,
        docs_url=None,
        redoc_url=None,
    )
    app.state.bodies = Bodies()
    app.state.doors = DOORS
    app.state.service = service
    app.router.route_class = BodyRoute
    app.router.redirect_slashes = False  # to whatever host a client names
    app.add_middleware(
        Edge,  # type: ignore[arg-type]
        config=service.config,
        metrics=service.metrics,
        doors=DOORS,
    )
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(InvalidRequest, _invalid_request)
    app.add_exception_handler(RecursionError, _too_deep)
    config = service.config
    store = None
    if config.files is not None:
        store = FileStore(config.files, config.max_files)
        service.metrics.watch_files(lambda: store.size)
    folder = None
    if config.responses is not None:
        folder = ResponseFolder(config.responses, config.max_responses)
    kept = KeptResponses(config.max_kept, folder)
    core = Core(service, app.state.bodies, media, kept, files=store)
    batches = None if store is None else Batches(core, store, ENDPOINTS)
    app.state.batches = batches
    _add_doors(app, core)
    files.add_routes(app, core)
    _add_facts(app, core)
    _add_page(app, service.config.root_path)
    return app


# Routes ------------------------------------------------------------------------------------------------------------


def _add_doors(app: FastAPI, core: Core) -> None:
    for door in DOORS.all:
        answer = _answer_of(door, core)
        app.post(door.path, responses=_RESPONSES)(answer)
        for path in door.others:
            app.post(path, include_in_schema=False)(answer)
        door.routes(app, core)


def _answer_of(door: Door, core: Core) -> Callable[..., Awaitable[Response]]:
    """Return a route by FastAPI's rules: the body's type is in its annotations."""

    async def answer(body: Any, request: Request) -> Response:
        return await door.answer(core, body, request)

    answer.__name__ = door.path.removeprefix("/v1/").replace("/", "_")
    answer.__doc__ = door.about
    answer.__annotations__["body"] = door.body
    return answer


def _add_facts(app: FastAPI, core: Core) -> None:
    service = core.service

    @app.get("/v1/models")
    @app.get("/models", include_in_schema=False)
    async def models() -> dict[str, Any]:
        """List the model and its abilities."""
        return {
            "object": "list",
            "data": [_card(service, name) for name in service.config.all_names],
        }

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    @app.get("/models/{name:path}", include_in_schema=False)
    async def model(name: str) -> dict[str, Any]:
        """Describe the model."""
        core.check_model(name)
        return _card(service, name)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Return this server's version."""
        return {"version": __version__}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Answer that the process is alive."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"description": "Not now; the body says why."}})
    async def ready() -> JsonResponse:
        """Answer 200 if requests would be answered, else 503."""
        is_ready = service.state in ("ready", "idle")
        return JsonResponse(
            {"status": service.state, "error": service.error}, 200 if is_ready else 503
        )

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return metrics in Prometheus's text format."""
        return Response(
            service.metrics.text(),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        """Return the batch's state, for the page."""
        now = service.stats()
        return {
            "status": service.state,
            "model": service.config.name,
            "batch": None if now is None else vars(now),
        }


def _add_page(app: FastAPI, root_path: str) -> None:
    page = resources.files("vlm_batch.server") / "page"
    index_html = (page / "index.html").read_text(encoding="utf-8")
    if root_path:
        # its links hold for the prefix without a slash behind it, too
        base = f'<head>\n<base href="{html.escape(root_path)}/">'
        index_html = index_html.replace("<head>", base, 1)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response(index_html, media_type="text/html; charset=utf-8")

    @app.get("/page/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        if name not in PAGE:
            raise ApiError(404, "the page has no such file")
        return Response((page / name).read_bytes(), media_type=PAGE[name])


_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request cannot be answered; the body says why."},
    "5XX": {"description": "The server or its model failed; the body says how."},
}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or server-sent events with `stream`.",
        "content": {"application/json": {}, "text/event-stream": {}},
    },
    **_ERRORS,
}


def _card(service: Service, name: str) -> dict[str, Any]:
    card: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "vlm-batch",
        "root": service.config.name,
    }
    loaded = service.model
    if loaded is not None:
        spec = loaded.batcher.spec
        card |= {
            "max_model_len": loaded.batcher.max_context,
            "family": spec.family,
            "vision": spec.images,
            "multi_image": spec.multi_image,
            "video": spec.video,
            "audio": spec.audio,
            "tools": loaded.dialect.tool_parser is not None,
            "reasoning": loaded.dialect.reasons,
        }
    return card


# Errors ------------------------------------------------------------------------------------------------------------


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):
        error = ApiError(
            error.status_code, _sentence(request, error), headers=error.headers
        )
    entry = entry_of(request)
    error.quote(entry.sent)
    entry.said["error"] = error.reason
    return entry.response_to(error)


async def _validation_error(request: Request, error: Exception) -> Response:
    """Answer an empty body, and what is wrong in an address; ``bodies`` checks the others."""
    assert isinstance(error, RequestValidationError)
    said, param = "the body is empty; send JSON with messages or a prompt", None
    place, *names = error.errors()[0]["loc"]
    if place == "query" and names:
        param = str(names[0])[:200]
        said = f"{param}: {error.errors()[0]['msg']}"
    return await _http_error(request, ApiError(400, said, param=param, code="missing"))


async def _invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidRequest)
    return await _http_error(request, refusal(error))


async def _too_deep(request: Request, error: Exception) -> Response:
    return await _http_error(request, ApiError(400, "the body is nested too deeply"))


def _sentence(request: Request, error: HTTPException) -> str:
    path = entry_of(request).path[:100]
    if error.status_code == 404:
        return _not_there(path)
    if error.status_code == 405:
        taken = (error.headers or {}).get("Allow", "")
        said = f"{path} does not take {request.method[:20]}"
        return f"{said}; it takes {taken}" if taken else said
    return str(error.detail)


def _not_there(path: str) -> str:
    for prefix, why in NOT_SERVED.items():
        if path.startswith(prefix):
            return f"{path} is not served: {why}"
    doors = ", ".join(door.path for door in DOORS.all)
    return f"there is no {path}; served are {doors} and /v1/models"
