"""A server of the tests' own, in a thread, on a free port of 127.0.0.1; stopped at the end, whatever happens."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from vlm_batch import VLMBatcher
from vlm_batch.assets import default_checkpoint
from vlm_batch.inputs.fetch import FetchPolicy
from vlm_batch.server.config import ServerConfig
from vlm_batch.server.run import Server, make_server

IMAGES = Path(__file__).parent.parent / "fixtures" / "images"
START_SECONDS = 60.0
STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Reply:
    """A response, read whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        return found


@dataclass(frozen=True)
class Running:
    """A running server."""

    server: Server
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, timeout: float = 60.0) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        timeout: float = 60.0,
    ) -> Reply:
        """One request; a ``body`` that is no bytes goes as JSON."""
        data = (
            body
            if body is None or isinstance(body, bytes)
            else json.dumps(body).encode()
        )
        sent = {"Content-Type": "application/json"} if body is not None else {}
        connection = self.connect(timeout)
        try:
            connection.request(method, path, data, {**sent, **(headers or {})})
            response = connection.getresponse()
            return Reply(
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                response.read(),
            )
        finally:
            connection.close()

    def chat(self, content: Any, **fields: Any) -> Reply:
        """A chat of one user's turn."""
        headers = fields.pop("headers", None)
        return self.ask(
            "POST",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": content}], **fields},
            headers=headers,
        )


@contextmanager
def serving(
    open_batcher: Callable[[], VLMBatcher] | None = None,
    *,
    policy: FetchPolicy | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """A server of the embedded checkpoint, or of ``open_batcher``, that is ready; ``settings`` are ServerConfig's."""
    config = ServerConfig(
        model=str(default_checkpoint()),
        **{"port": 0, "shutdown_seconds": 1.0, **settings},
    )
    server = make_server(config, open_batcher or open_checkpoint, policy=policy)
    thread = threading.Thread(target=server.run, name="test-server", daemon=True)
    thread.start()
    try:
        wait_until(
            lambda: server.started or not thread.is_alive(), "the server to listen"
        )
        running = Running(server, server.servers[0].sockets[0].getsockname()[1])
        wait_until(lambda: server.service.state != "loading", "the model to load")
        yield running
    finally:
        server.should_exit = True
        thread.join(STOP_SECONDS)
        assert not thread.is_alive(), "the server did not stop"


def open_checkpoint() -> VLMBatcher:
    """The embedded checkpoint."""
    return VLMBatcher(str(default_checkpoint()), max_rows=16)


def wait_until(
    condition: Callable[[], bool], what: str, seconds: float = START_SECONDS
) -> None:
    """Wait for something that is about to happen. Raises AssertionError if it does not."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited {seconds} s for {what}"
        time.sleep(0.01)


def data_uri(name: str) -> str:
    """A sample picture."""
    return (
        "data:image/png;base64,"
        + base64.b64encode((IMAGES / name).read_bytes()).decode()
    )


def picture(name: str) -> dict[str, Any]:
    """A sample picture as a content part."""
    return {"type": "image_url", "image_url": {"url": data_uri(name)}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}
