"""From a configuration to a running server."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from socket import socket

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from vlm_batch.batcher import VLMBatcher
from vlm_batch.inputs.fetch import FetchPolicy
from vlm_batch.server.app import create_app
from vlm_batch.server.config import ServerConfig
from vlm_batch.server.media import MediaReader
from vlm_batch.server.service import Service

#: Seconds beyond ``shutdown_seconds`` after which connections that are still open are cut.
CUT_AFTER = 5
#: Connections that may wait to be accepted, and those that may be open at a time.
BACKLOG, MAX_CONNECTIONS = 1024, 2048
#: Seconds for which an idle connection is kept.
KEEP_ALIVE = 30
#: Seconds that the head of a request may take to arrive; the edge bounds the body's.
HEAD_SECONDS = 30.0

logger = logging.getLogger("vlm_batch.server")


class Connection(H11Protocol):
    """uvicorn's connection, closed if the head of a request does not arrive in time: it would take a place for ever."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.timeout_keep_alive_task is not None:
            self._stop_waiting()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Server(uvicorn.Server):
    """uvicorn, which lets answers end before it goes: new requests are refused, and streams end in order."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Wait for answers within the limit, end the rest, then close connections."""
        for server in self.servers:
            server.close()
        await self.service.drain(self.service.config.shutdown_seconds)
        await super().shutdown(sockets)


def make_server(
    config: ServerConfig, open_batcher: Callable[[], VLMBatcher], *, policy: FetchPolicy | None = None
) -> Server:
    """A server that has not begun; ``run()`` or ``serve()`` begins it. ``policy`` replaces the configuration's for media."""
    service = Service(config, open_batcher)
    app = create_app(service, MediaReader(config, policy))
    options = uvicorn.Config(
        app,
        http=Connection,
        host=config.host,
        port=config.port,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        backlog=BACKLOG,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=CUT_AFTER,
        ws="none",
        lifespan="on",
    )
    return Server(options, service)


def serve(config: ServerConfig, open_batcher: Callable[[], VLMBatcher]) -> bool:
    """Serve until the process is told to stop. False if the server could not begin."""
    server = make_server(config, open_batcher)
    set_up_logs()
    if not config.needs_key and not config.is_loopback:
        logger.warning("NO KEY IS NEEDED: everyone who can reach %s:%d can use this server", config.host, config.port)
    logger.info("serving %s on http://%s:%d", config.name, config.host, config.port)
    server.run()
    return server.started


def set_up_logs(level: int = logging.INFO) -> None:
    """Send the log to stderr as text, and the access log to stdout as one JSON object a line."""
    for name, stream, form in (
        ("vlm_batch.server", sys.stderr, "%(asctime)s %(levelname)s %(message)s"),
        ("vlm_batch.server.access", sys.stdout, "%(message)s"),
        ("uvicorn.error", sys.stderr, "%(asctime)s %(levelname)s %(message)s"),
    ):
        log = logging.getLogger(name)
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter(form))
        log.handlers = [handler]
        log.setLevel(level if name != "uvicorn.error" else logging.WARNING)
        log.propagate = False
