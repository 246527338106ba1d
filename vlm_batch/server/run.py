"""From a configuration to a running server."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from socket import socket

import mlx.core as mx
import uvicorn

from vlm_batch.inputs.fetch import FetchPolicy
from vlm_batch.server.app import create_app
from vlm_batch.server.config import ServerConfig
from vlm_batch.server.media import MediaReader
from vlm_batch.server.service import Batcher, Service

#: Seconds beyond ``shutdown_seconds`` after which connections that are still open are cut.
CUT_AFTER = 5
#: Connections that may wait to be accepted, and those that may be open at a time.
BACKLOG, MAX_CONNECTIONS = 1024, 2048
#: Seconds for which an idle connection is kept.
KEEP_ALIVE = 30

logger = logging.getLogger("vlm_batch.server")


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
    config: ServerConfig, open_batcher: Callable[[], Batcher], *, policy: FetchPolicy | None = None
) -> Server:
    """A server that has not begun; ``run()`` or ``serve()`` begins it. ``policy`` replaces the configuration's for media."""
    service = Service(config, open_batcher, memory=mx.get_active_memory, release=mx.clear_cache)
    app = create_app(service, MediaReader(config, policy))
    options = uvicorn.Config(
        app,
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


def serve(config: ServerConfig, open_batcher: Callable[[], Batcher]) -> bool:
    """Serve until the process is told to stop. False if the server could not begin."""
    server = make_server(config, open_batcher)
    set_up_logs()
    if config.api_key is None and not config.is_loopback:
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
