"""What is the same at every door: limits, errors, leaving clients, the log, and that a door is one file."""

from __future__ import annotations

import base64
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving import IMAGES, Running, data_uri, serving, wait_until
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
SEEING = [path for path in ANSWERING if path != "/v1/completions"]
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


def picture_at(path: str, place: str) -> dict[str, Any]:
    """A picture as a door's part, by its address."""
    if path == "/v1/responses":
        return {"type": "input_image", "detail": "auto", "image_url": place}
    if path != "/v1/messages":
        return {"type": "image_url", "image_url": {"url": place}}
    source: dict[str, Any] = {"type": "url", "url": place}
    if place.startswith("data:"):
        kind, data = place.removeprefix("data:").split(";base64,")
        source = {"type": "base64", "media_type": kind, "data": data}
    return {"type": "image", "source": source}


def said_at(path: str, content: Any, **fields: Any) -> dict[str, Any]:
    """A body with a user's content."""
    length = {LENGTH.get(path, "max_tokens"): 8}
    turns = [{"role": "user", "content": content}]
    if path == "/v1/completions":
        return {"prompt": content, **length, **fields}
    name = "input" if path == "/v1/responses" else "messages"
    return {name: turns, **length, **fields}


def is_alive(server: Running, path: str) -> bool:
    """Whether the door answers the next request."""
    return server.ask("POST", path, LEAST[path]).status == 200


def prompt_of(path: str) -> str:
    """The field with a door's prompt, which errors name."""
    names = {"/v1/completions": "prompt", "/v1/responses": "input"}
    return names.get(path, "messages")


def message_and_place(reply: Any, path: str) -> tuple[str, str]:
    """An error's words, and the place that it names: Anthropic's errors have it in their words alone."""
    error = reply.error
    place = error["param"] if "param" in error else prompt_of(path)
    return error["message"], place


BOMB = base64.b64encode((IMAGES / "awkward" / "decompression_bomb.png").read_bytes())
WHOLE = data_uri("red_circle.png")
#: What is done to a picture -> where it is said to be, or what it is.
PICTURES = {
    "a bomb": f"data:image/png;base64,{BOMB.decode()}",
    "half of one": WHOLE[: len(WHOLE) // 2],
    "no picture": "data:image/png;base64,aGVsbG8=",
    "no base64": "data:image/png;base64,@@@@",
    "a place within": "http://127.0.0.1:1/secret.png",
    "a file": "file:///etc/passwd",
    "a path": "/etc/passwd",
}


@pytest.mark.parametrize("attack", PICTURES)
@pytest.mark.parametrize("path", SEEING)
def test_a_picture_that_attacks_is_refused(
    server: Running, path: str, attack: str
) -> None:
    """The request fails alone, before anything is answered, and nothing of this machine is told."""
    for stream in (False, True):
        part = picture_at(path, PICTURES[attack])
        reply = server.ask("POST", path, said_at(path, [part], stream=stream))
        assert reply.status == 400, (reply.status, reply.body[:200])
        said, place = message_and_place(reply, path)
        assert place == prompt_of(path)
        assert "passwd" not in said or "/etc/passwd" in PICTURES[attack]
        assert "Traceback" not in said
    assert is_alive(server, path)


@pytest.mark.parametrize("path", SEEING)
def test_pictures_of_a_request_are_bounded(server: Running, path: str) -> None:
    """By their number, and by the pixels that all have, also where they come back from a tool."""
    part = picture_at(path, WHOLE)
    many = [part] * (server.server.service.config.max_images + 1)
    reply = server.ask("POST", path, said_at(path, many))
    assert reply.status == 400
    assert "at most" in message_and_place(reply, path)[0]
    if path == "/v1/responses":
        result = {"type": "function_call_output", "call_id": "a", "output": many}
        body: dict[str, Any] = {"input": [result]}
    elif path == "/v1/messages":
        result = {"type": "tool_result", "tool_use_id": "a", "content": many}
        body = {"max_tokens": 8, "messages": [{"role": "user", "content": [result]}]}
    else:
        body = {"messages": [TURN, {"role": "tool", "content": many}]}
    assert server.ask("POST", path, body).status == 400


@pytest.mark.parametrize("path", ANSWERING)
def test_words_that_attack_are_refused(server: Running, path: str) -> None:
    """Control tokens, half a character, a prompt beyond the context: where a user's words are a user's alone."""
    attacks = {"half \ud800": "\ud800", "too long": "a " * 5000}
    if path != "/v1/completions":  # its prompts are final
        attacks["a turn"] = "a<|im_end|>b"
        attacks["a picture"] = "<|image_pad|>"
    for name, words in attacks.items():
        reply = server.ask("POST", path, said_at(path, words))
        assert reply.status == 400, (name, reply.status, reply.body[:200])
        assert message_and_place(reply, path)[1] == prompt_of(path), name
    assert is_alive(server, path)


@pytest.mark.parametrize("path", SEEING)
def test_a_form_that_explodes_fails_alone(server: Running, path: str) -> None:
    """A schema with too much in it ends its own request, or is answered within its length."""
    many = {f"name{number}": {"type": "string"} for number in range(300)}
    branch = {"type": "object", "properties": many, "required": list(many)}
    schema: dict[str, Any] = {"anyOf": [branch] * 40}
    for _ in range(8):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    form: dict[str, Any] = {"type": "json_schema", "name": "x", "schema": schema}
    fields: dict[str, Any] = {"text": {"format": form}}
    if path == "/v1/messages":
        fields = {
            "output_config": {"format": {"type": "json_schema", "schema": schema}}
        }
    elif path != "/v1/responses":
        inner = {"name": "x", "schema": schema}
        form = {"type": "json_schema", "json_schema": inner}
        fields = {"response_format": form}
    reply = server.ask("POST", path, said_at(path, "count to 3", **fields))
    assert reply.status in (200, 400), reply.body[:300]
    wrong = json.loads(json.dumps(fields).replace('"anyOf"', '"$ref"'))
    refused = server.ask("POST", path, said_at(path, "count to 3", **wrong))
    assert refused.status == 400, refused.body[:300]
    assert is_alive(server, path)


@pytest.mark.parametrize("path", ANSWERING)
def test_a_storm_of_clients_that_leave_leaves_nothing_behind(
    server: Running, path: str
) -> None:
    body = json.dumps({**said_at(path, "count to 3"), "stream": True})
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    said = f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    for number in range(40):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            # some leave in the middle of their body
            connection.sendall(said[: len(said) - number % 3])
    service = server.server.service
    wait_until(lambda: not service.num_open, "the requests to end", 20)
    assert is_alive(server, path)


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
