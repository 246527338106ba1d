"""From a configuration to a running server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import sys
from collections.abc import Callable
from functools import partial
from socket import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from vlm_batch.batcher import VLMBatcher
from vlm_batch.inputs.fetch import FetchPolicy
from vlm_batch.server.app import create_app
from vlm_batch.server.config import ServerConfig
from vlm_batch.server.errors import envelope, json_bytes
from vlm_batch.server.media import MediaReader
from vlm_batch.server.service import Service

#: Seconds beyond ``shutdown_seconds`` after which connections that are still open are cut.
CUT_AFTER = 5
#: Connections that may wait to be accepted, and those that may be open at a time; of one address, before it makes room itself.
BACKLOG, MAX_CONNECTIONS, MAX_PER_ADDRESS = 1024, 2048, 1024
#: Connections beyond these, for those who ask whether the server lives, and files of a process that are no connections.
RESERVED, OTHER_FILES = 128, 256
#: Seconds for which an idle connection is kept.
KEEP_ALIVE = 30
#: Seconds that the head of a request may take to arrive; the edge bounds the body's.
HEAD_SECONDS = 30.0

logger = logging.getLogger("vlm_batch.server")


class Places:
    """Open connections by address, each address's in the order in which they were last heard."""

    def __init__(self) -> None:
        self._open: dict[str, dict[Connection, None]] = {}
        self._size = 0
        self._most = min(MAX_CONNECTIONS, _most_files() - OTHER_FILES - RESERVED)

    def add(self, new: Connection) -> None:
        """Count a connection. Too many are open: close the one of its address, if that has many, else of the one that has
        most, whose client has been silent for longest while its server waits for it; or the new one, if there is none."""
        address = new.address
        self._open.setdefault(address, {})[new] = None
        self._size += 1
        if len(self._open[address]) <= MAX_PER_ADDRESS:
            if self._size <= self._most:
                return
            address = max(self._open, key=lambda one: len(self._open[one]))
        silent = next((one for one in self._open[address] if one is not new and one.is_waited_for), None)
        if silent is not None:
            silent.transport.abort()
        elif self._size > self._most + RESERVED:
            new.transport.abort()

    def note(self, connection: Connection) -> None:
        """A connection was heard."""
        of_address = self._open[connection.address]
        of_address[connection] = of_address.pop(connection)

    def remove(self, connection: Connection) -> None:
        self._size -= 1
        of_address = self._open[connection.address]
        del of_address[connection]
        if not of_address:
            del self._open[connection.address]


class Connection(H11Protocol):
    """uvicorn's connection, closed if the head of a request does not arrive in time: it would take a place for ever."""

    _late: asyncio.TimerHandle | None = None

    def __init__(self, places: Places, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._places = places

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._places.add(self)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        self._places.note(self)
        super().data_received(data)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.remove(self)
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def is_waited_for(self) -> bool:
        """Whether its client has to say more before anything can be answered."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing()

    def send_400_response(self, msg: str) -> None:
        """Answer to what is no HTTP, as to everything else that is refused."""
        body = json_bytes(envelope(400, msg))
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

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
        http=partial(Connection, Places()),  # type: ignore[arg-type]
        host=config.host,
        port=config.port,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=CUT_AFTER,
        ws="none",
        lifespan="on",
    )
    return Server(options, service)


def _most_files() -> int:
    """Files and connections that the process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft >= 0 else sys.maxsize


def _allow_connections() -> None:
    """Have as many files as connections need, where the system lets a process have them: usual are 1,024, on a Mac 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + RESERVED + OTHER_FILES
    if 0 <= soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))


def serve(config: ServerConfig, open_batcher: Callable[[], VLMBatcher]) -> bool:
    """Serve until the process is told to stop. False if the server could not begin."""
    server = make_server(config, open_batcher)
    set_up_logs()
    _allow_connections()
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
