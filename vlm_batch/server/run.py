"""Starting and running the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import sys
from collections.abc import Callable
from functools import partial
from socket import socket
from types import FrameType
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
from vlm_batch.server.service import MAX_OPEN, Service

#: Seconds after ``shutdown_seconds`` at which open connections are cut.
CUT_AFTER = 5
#: Most connections waiting to be accepted, open in all, and open from one address.
BACKLOG, MAX_CONNECTIONS, MAX_PER_ADDRESS = 2048, 2048, 1792
#: Further connections for health checks, and files that are no connections.
RESERVED, OTHER_FILES = 128, 256
#: The largest part of the files that each of these two gets where few may be open.
RESERVED_PART, OTHER_PART = 1 / 8, 1 / 2
#: Seconds to keep an idle connection.
KEEP_ALIVE = 30
#: Most seconds for a request's head to arrive.
HEAD_SECONDS = 30.0
#: Most seconds in which a client takes nothing of what is sent to it, and in all that one answer's rest takes.
UNREAD_SECONDS, MOST_READING_SECONDS = 60.0, 900.0

logger = logging.getLogger("vlm_batch.server")


class Connections:
    """Open connections by address, least recently active first."""

    def __init__(self, num_files: int) -> None:
        """Share out ``num_files``, the files that the process may open."""
        self._open: dict[str, dict[Connection, None]] = {}
        self._size = 0
        self._reserved = min(RESERVED, int(num_files * RESERVED_PART))
        others = min(OTHER_FILES, int(num_files * OTHER_PART))
        self.most = min(MAX_CONNECTIONS, num_files - others - self._reserved)

    def add(self, new: Connection) -> None:
        """Count a connection; above the limit, close the longest silent one of its address, or of the busiest."""
        address = new.address
        self._open.setdefault(address, {})[new] = None
        self._size += 1
        if len(self._open[address]) <= MAX_PER_ADDRESS:
            if self._size <= self.most:
                return
            address = max(self._open, key=lambda one: len(self._open[one]))
        silent = next(
            (
                one
                for one in self._open[address]
                if one is not new and one.is_waited_for
            ),
            None,
        )
        if silent is not None:
            silent.transport.abort()
        elif self._size > self.most + self._reserved:
            new.transport.abort()

    def touch(self, connection: Connection) -> None:
        of_address = self._open[connection.address]
        of_address[connection] = of_address.pop(connection)

    def remove(self, connection: Connection) -> None:
        self._size -= 1
        of_address = self._open[connection.address]
        del of_address[connection]
        if not of_address:
            del self._open[connection.address]


class Connection(H11Protocol):
    """uvicorn's connection, closed if a request head is late."""

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def __init__(self, connections: Connections, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._connections = connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # writing pauses as soon as the client reads too little
        transport.set_write_buffer_limits(high=0)
        self.address = self.client[0] if self.client else ""
        self._connections.add(self)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        self._connections.touch(self)
        super().data_received(data)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._stop_waiting()
        self._stop_counting()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_whether_it_reads(self.loop.time(), None)

    def resume_writing(self) -> None:
        self._stop_counting()
        super().resume_writing()

    def _look_whether_it_reads(self, since: float, left_before: int | None) -> None:
        """Close the connection of a client that reads nothing of an answer, or very slowly."""
        left = self.transport.get_write_buffer_size()
        if left == left_before or self.loop.time() - since > MOST_READING_SECONDS:
            self.transport.abort()
        else:
            self._unread = self.loop.call_later(
                UNREAD_SECONDS, self._look_whether_it_reads, since, left
            )

    def _stop_counting(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    @property
    def is_waited_for(self) -> bool:
        """Whether the server waits for its client."""
        return (
            self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
            and not self.transport.is_closing()
        )

    def send_400_response(self, msg: str) -> None:
        body = json_bytes(envelope(400, msg))
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _wait_for_head(self) -> None:
        if (
            self.conn.their_state is not h11.IDLE
            or self.timeout_keep_alive_task is not None
        ):
            self._stop_waiting()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Server(uvicorn.Server):
    """uvicorn's server, which lets answers end before stopping."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self._is_hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; at the second signal end the open requests at once, and at the third do not wait for their clients."""
        if self._is_hurried:
            self.force_exit = True
        self._is_hurried = self.should_exit
        self.should_exit = True
        # what the process ends with, once
        self._captured_signals[:] = [*self._captured_signals, sig][:1]

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        seconds, num_open = self.service.config.shutdown_seconds, self.service.num_open
        if num_open and seconds and not self._is_hurried:
            requests = "1 request" if num_open == 1 else f"{num_open} requests"
            logger.info(
                "waiting up to %g s for %s; Ctrl-C again ends now", seconds, requests
            )
        await self.service.drain(seconds, is_hurried=lambda: self._is_hurried)
        await super().shutdown(sockets)


def make_server(
    config: ServerConfig,
    open_batcher: Callable[[], VLMBatcher],
    *,
    policy: FetchPolicy | None = None,
) -> Server:
    """Return a server that ``run()`` or ``serve()`` starts; ``policy`` is for media."""
    service = Service(config, open_batcher)
    app = create_app(service, MediaReader(config, policy))
    connections = Connections(_allow_files())
    # Of the sockets some are left for who comes while others wait.
    service.burst.most = min(
        MAX_OPEN, int(connections.most * MAX_OPEN / MAX_CONNECTIONS)
    )
    options = uvicorn.Config(
        app,
        http=partial(Connection, connections),  # type: ignore[arg-type]
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
        proxy_headers=bool(config.proxies),
        forwarded_allow_ips=list(config.proxies),
    )
    return Server(options, service)


def _allow_files() -> int:
    """Raise the limit of open files, often 1,024, or 256 on a Mac; return how many may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + RESERVED + OTHER_FILES
    if 0 <= soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE,
                (wanted if hard < 0 else min(wanted, hard), hard),
            )
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft >= 0 else sys.maxsize


def serve(config: ServerConfig, open_batcher: Callable[[], VLMBatcher]) -> bool:
    """Serve until told to stop; return False if it could not begin."""
    server = make_server(config, open_batcher)
    set_up_logs()
    if not config.needs_key and not config.is_loopback:
        logger.warning(
            "NO KEY IS NEEDED: everyone who can reach %s:%d can use this server",
            config.host,
            config.port,
        )
    logger.info("serving %s on http://%s:%d", config.name, config.host, config.port)
    server.run()
    return server.started


def set_up_logs() -> None:
    """Log text to stderr, accesses to stdout, one JSON object a line."""
    for name, stream, form, level in (
        (
            "vlm_batch.server",
            sys.stderr,
            "%(asctime)s %(levelname)s %(message)s",
            logging.INFO,
        ),
        ("vlm_batch.server.access", sys.stdout, "%(message)s", logging.INFO),
        (
            "uvicorn.error",
            sys.stderr,
            "%(asctime)s %(levelname)s %(message)s",
            logging.WARNING,
        ),
    ):
        log = logging.getLogger(name)
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter(form))
        log.handlers = [handler]
        log.setLevel(level)
        log.propagate = False
