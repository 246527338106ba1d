"""What is the same at every door: limits, errors, leaving clients, the log, and that a door is one file."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving import Running, serving, wait_until
from vlm_batch.server.doors import DOORS
from vlm_batch.server.wire import Body, Wire

TURN = {"role": "user", "content": "count to 3"}
#: Paths -> the least that they take, as a function of the user's words.
LEAST: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [TURN]},
    "/v1/completions": {"prompt": "count to 3"},
    "/v1/responses": {"input": "count to 3"},
    "/v1/responses/input_tokens": {"input": "count to 3"},
    "/v1/messages": {"max_tokens": 300, "messages": [TURN]},
    "/v1/messages/count_tokens": {"messages": [TURN]},
    # over a file that is there, whose only line is no request
    "/v1/batches": {"endpoint": "/v1/completions", "completion_window": "24h"},
}
ANSWERING = [path for path in LEAST if "tokens" not in path and "batches" not in path]
LENGTH = {"/v1/responses": "max_output_tokens"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("doors")
    with serving(max_body=1 << 20, files=folder) as running:
        disposition = b"--X\r\nContent-Disposition: form-data; name="
        form = disposition + b'"purpose"\r\n\r\nbatch\r\n'
        form += disposition + b'"file"; filename="a"\r\n\r\n{}\r\n--X--\r\n'
        kind = {"Content-Type": "multipart/form-data; boundary=X"}
        file = running.ask("POST", "/v1/files", form, headers=kind).json
        LEAST["/v1/batches"]["input_file_id"] = file["id"]
        yield running


def test_every_door_is_here() -> None:
    assert set(LEAST) == {door.path for door in DOORS.all}


@pytest.mark.parametrize("path", LEAST)
def test_the_least_is_answered_at_every_path(server: Running, path: str) -> None:
    door = DOORS.at(path)
    assert door is not None
    for place in door.paths:
        assert server.ask("POST", place, LEAST[path]).status == 200, place
    reply = server.ask("GET", path)
    assert reply.status in ((200,) if path == "/v1/batches" else (404, 405))


@pytest.mark.parametrize("path", LEAST)
def test_attacks_have_the_doors_own_errors(server: Running, path: str) -> None:
    deep = b'{"metadata": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    wide = b'{"model": [' + b"0," * (1 + (1 << 18)) + b"0]}"
    infinite = json.dumps({**LEAST[path], "temperature": 1}).replace("1}", "1e999}")
    named = json.dumps({**LEAST[path], "<script>": {"a": 1}})
    many = json.dumps({**LEAST[path], **{f"f{n}": 1 for n in range(200)}})
    for body, status in (
        (deep, 400), (wide, 413), (infinite.encode(), 400), (named.encode(), 400), (many.encode(), 400),
        (b"\xff", 400), (b"[]", 400), (b"", 400), (b"x" * (2 << 20), 413),
    ):  # fmt: skip
        reply = server.ask("POST", path, body)
        assert reply.status == status, (body[:40], reply.status, reply.body[:200])
        assert reply.error["message"]
        assert ("request_id" in reply.json) == path.startswith("/v1/messages")
    plain = {"Content-Type": "text/plain"}
    assert server.ask("POST", path, b"{}", headers=plain).status == 415
    assert server.ask("POST", path, {**LEAST[path], "model": "other"}).status == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ANSWERING)
def test_a_client_that_leaves_ends_its_request(
    server: Running, path: str, stream: bool
) -> None:
    length = {LENGTH.get(path, "max_tokens"): 1500}
    body = json.dumps({**LEAST[path], **length, "stream": stream, "min_tokens": 1500})
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        stats = server.server.service.stats
        wait_until(lambda: (now := stats()) is not None and now.decoding > 0, "a row")
    wait_until(lambda: not server.server.service.num_open, "the request to end", 20)


@pytest.mark.parametrize("path", LEAST)
def test_the_log_has_no_word_of_a_request(
    server: Running, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = json.loads(json.dumps(LEAST[path]).replace("count to 3", "count to 4"))
    with caplog.at_level(logging.INFO, "vlm_batch.server.access"):
        for name, body in (
            ("own-1", said),
            ("own-2", {**said, "secret": "count to 4"}),
        ):
            server.ask("POST", path, body, headers={"X-Request-Id": name})

        def lines() -> list[str]:
            return [line for line in caplog.messages if '"own-' in line]

        # the line comes behind the answer
        wait_until(lambda: len(lines()) == 2, "both lines")
    assert all(path in line and "count to 4" not in line for line in lines())


def test_bodies_know_their_fields() -> None:
    """No object of a door takes a field that nobody knows, and what is refused is no honoured field."""
    left: list[type[Wire]] = [Wire]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        assert kind.model_config["extra"] == "forbid"
        if issubclass(kind, Body):
            assert not kind.refused.keys() & kind.model_fields.keys(), kind
