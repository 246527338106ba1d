"""The application: routes, and errors in one form."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException

from vlm_batch._version import __version__
from vlm_batch.errors import InvalidRequest
from vlm_batch.server.answers import Dialect
from vlm_batch.server.bodies import Bodies, BodyRoute
from vlm_batch.server.config import ServerConfig
from vlm_batch.server.edge import ENTRY, Edge, Entry
from vlm_batch.server.errors import ApiError, JsonResponse, refusal
from vlm_batch.server.media import MediaReader
from vlm_batch.server.openai import (
    MAX_PRIORITY,
    Ask,
    chat_ask,
    completion_ask,
    names_of,
)
from vlm_batch.server.replies import ChatExchange, Exchange, TextExchange
from vlm_batch.server.service import Service
from vlm_batch.server.streams import EventStream, unless_left
from vlm_batch.server.wire import ChatRequest, CompletionRequest

#: Endpoints of other servers, and the alternative here.
NOT_SERVED = {
    "/v1/embeddings": "no family here makes embeddings",
    "/v1/responses": "python -m vlm_batch.integrations.mlx_vlm serves it with the same engine",
    "/v1/messages": "python -m vlm_batch.integrations.mlx_vlm serves it with the same engine",
    "/v1/realtime": "python -m vlm_batch.integrations.mlx_vlm serves it with the same engine",
    "/v1/batches": "vlm-batch run answers for files of requests",
    "/v1/files": "send pictures in the request, as data URIs",
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
#: Seconds after a request's own time limit at which its stream is cut.
GRACE = 10.0


def create_app(service: Service, media: MediaReader) -> FastAPI:
    config = service.config

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()
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
    app.state.service = service
    app.router.route_class = BodyRoute
    app.router.redirect_slashes = False  # to whatever host a client names
    app.add_middleware(Edge, config=config, metrics=service.metrics)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(InvalidRequest, _invalid_request)
    app.add_exception_handler(RecursionError, _too_deep)
    _add_answers(app, service, media)
    _add_facts(app, service)
    _add_page(app)
    return app


# Routes ------------------------------------------------------------------------------------------------------------


def _add_answers(app: FastAPI, service: Service, media: MediaReader) -> None:
    config = service.config

    @app.post("/v1/chat/completions", responses=_RESPONSES)
    @app.post("/chat/completions", include_in_schema=False)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a chat, with pictures and videos in its messages."""
        _check_model(config, body.model)
        entry, read = _entry(request), app.state.bodies.read

        async def prepare(dialect: Dialect) -> Ask:
            make = partial(chat_ask, thinks=dialect.reasons)
            ask: Ask = await read(
                entry,
                make,
                body,
                config,
                dialect.writer,
                dialect.reads,
                dialect.recommended,
            )
            (prompt,) = ask.prompts
            messages = await media.read(
                prompt["messages"], entry.hold, client=entry.number
            )
            return replace(ask, prompts=({"messages": messages},))

        return await _reply(
            ChatExchange(
                service,
                entry,
                prepare,
                priority=_priority(request),
                names=names_of(body),
            ),
            body.stream,
            request,
        )

    @app.post("/v1/completions", responses=_RESPONSES)
    @app.post("/completions", include_in_schema=False)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text or token ids."""
        _check_model(config, body.model)
        entry, read = _entry(request), app.state.bodies.read

        async def prepare(dialect: Dialect) -> Ask:
            ask: Ask = await read(
                entry, completion_ask, body, config, dialect.recommended
            )
            return ask

        return await _reply(
            TextExchange(
                service,
                entry,
                prepare,
                priority=_priority(request),
                names=names_of(body),
            ),
            body.stream,
            request,
        )


def _add_facts(app: FastAPI, service: Service) -> None:
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
        _check_model(service.config, name)
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


def _add_page(app: FastAPI) -> None:
    page = files("vlm_batch.server") / "page"

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response(
            (page / "index.html").read_bytes(), media_type="text/html; charset=utf-8"
        )

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


async def _reply(exchange: Exchange, stream: bool | None, request: Request) -> Response:
    """Return the answer or its stream; errors before the stream have a status."""
    if not stream:
        return JsonResponse(await unless_left(request, exchange.whole()))
    chunks = exchange.stream()
    first = await unless_left(request, anext(chunks))  # type: ignore[arg-type]
    _entry(request).sent = b""
    return EventStream(first, chunks, seconds=exchange.seconds + GRACE)


def _check_model(config: ServerConfig, name: str | None) -> None:
    if name is not None and name not in config.names and not config.any_model:
        said = f"there is no model {name[:100]!r} here; this server's is {config.name!r} (or leave model out)"
        raise ApiError(404, said, param="model", code="model_not_found")


def _priority(request: Request) -> int:
    given = request.headers.get("x-priority", "0")
    if not re.fullmatch(r"-?[0-9]{1,3}", given) or abs(int(given)) > MAX_PRIORITY:
        raise ApiError(
            400,
            f"X-Priority must be an integer in -{MAX_PRIORITY}..{MAX_PRIORITY}; higher goes first",
        )
    if int(given) and not _entry(request).has_priority:
        raise ApiError(
            403,
            "X-Priority is taken with keys that are marked for it (vlm-batch serve --keys)",
        )
    return int(given)


def _card(service: Service, name: str) -> dict[str, Any]:
    card: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "vlm-batch",
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
    error.quote(_entry(request).sent)
    _entry(request).said["error"] = error.reason
    return JsonResponse(error.body, error.status_code, error.headers)


async def _validation_error(request: Request, error: Exception) -> Response:
    """Answer an empty body; ``bodies`` checks the others."""
    assert isinstance(error, RequestValidationError)
    return await _http_error(
        request,
        ApiError(
            400,
            "the body is empty; send JSON with messages or a prompt",
            code="missing",
        ),
    )


async def _invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidRequest)
    return await _http_error(request, refusal(error))


async def _too_deep(request: Request, error: Exception) -> Response:
    return await _http_error(request, ApiError(400, "the body is nested too deeply"))


def _sentence(request: Request, error: HTTPException) -> str:
    path = _entry(request).path
    if error.status_code == 404:
        instead = next(
            (why for prefix, why in NOT_SERVED.items() if path.startswith(prefix)), None
        )
        served = "served are /v1/chat/completions, /v1/completions and /v1/models"
        return (
            f"{path[:100]} is not served: {instead}"
            if instead
            else f"there is no {path[:100]}; {served}"
        )
    if error.status_code == 405:
        taken = (error.headers or {}).get("Allow", "")
        return f"{path[:100]} does not take {request.method[:20]}" + (
            f"; it takes {taken}" if taken else ""
        )
    return str(error.detail)


def _entry(request: Request) -> Entry:
    entry: Entry = request.scope[ENTRY]
    return entry
