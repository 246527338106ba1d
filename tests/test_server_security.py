"""What strangers may not do: reach other hosts and files through the server, come in without a key, or exhaust it."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from tests.serving import IMAGES, Reply, Running, serving, text, wait_until
from vlm_batch.inputs import download, pool
from vlm_batch.inputs.fetch import FetchPolicy
from vlm_batch.inputs.grammar import Forms
from vlm_batch.inputs.pool import Pool
from vlm_batch.server import bodies, edge, run
from vlm_batch.server.bodies import read_body
from vlm_batch.server.config import InvalidConfig, ServerConfig
from vlm_batch.server.doors.chat import ChatRequest
from vlm_batch.server.doors.completions import CompletionRequest
from vlm_batch.server.errors import ApiError, without_paths
from vlm_batch.server.media import policy_of
from vlm_batch.server.service import Service, Visit
from vlm_batch.types import SamplingParams

#: Stands for a public address in these tests: loopback's second address, which the machine answers on as well.
PUBLIC = "127.0.0.2"
KEY = "s\u00e9same"
SESAME = {"Authorization": "Bearer " + KEY.encode().decode("latin-1")}
PICTURE = (IMAGES / "red_circle.png").read_bytes()


class Hostile(BaseHTTPRequestHandler):
    """A web server that does whatever hurts; ``seen`` are the paths that were asked of it."""

    seen: list[str] = []
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.seen.append(self.path)
        with suppress(OSError):
            getattr(self, "_" + self.path.strip("/").split("/")[0])()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _picture(self) -> None:
        self._send(200, PICTURE)

    def _large(self) -> None:
        self._send(200, bytes(100_000))

    def _secret(self) -> None:
        self._send(200, PICTURE)

    def _page(self) -> None:
        self._send(200, b"<html>token=hunter2</html>", kind="text/html")

    def _missing(self) -> None:
        self._send(404, b"hunter2")

    def _loopback(self) -> None:
        self._redirect(f"http://127.0.0.1:{self.server.server_port}/secret")  # type: ignore[attr-defined]

    def _metadata(self) -> None:
        self._redirect("http://169.254.169.254/latest/meta-data/")

    def _file(self) -> None:
        self._redirect("file:///etc/passwd")

    def _circle(self) -> None:
        self._redirect("/circle")

    def _slow(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        for _ in range(100):
            self.wfile.write(b"x")
            time.sleep(0.1)

    def _silent(self) -> None:
        time.sleep(10)

    def _endless(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while True:
            self.wfile.write(b"10000\r\n" + bytes(65536) + b"\r\n")

    def _liar(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "99999999999999")
        self.end_headers()
        self.wfile.write(PICTURE)

    def _redirect(self, where: str) -> None:
        self.send_response(302)
        self.send_header("Location", where)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, status: int, body: bytes, kind: str = "image/png") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def hostile() -> Iterator[int]:
    """The port of a hostile web server on all loopback addresses."""
    listener = ThreadingHTTPServer(("0.0.0.0", 0), Hostile)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    yield listener.server_port
    listener.shutdown()
    listener.server_close()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Fetches URLs, with tight limits."""
    policy = FetchPolicy(
        allow_http=True,
        allow_files=False,
        max_bytes=1 << 20,
        seconds=1.0,
        max_redirects=3,
    )
    with serving(policy=policy) as running:
        yield running


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes one address count as public."""
    monkeypatch.setattr(download, "is_public", lambda address: address == PUBLIC)
    for name in (
        "http_proxy",
        "HTTP_PROXY",
        "https_proxy",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    Hostile.seen.clear()


def describe(server: Running, url: str) -> Reply:
    return server.chat(
        [{"type": "image_url", "image_url": {"url": url}}, text("describe the picture")]
    )


def refused(reply: Reply) -> str:
    """The message of a refusal, which tells nothing of this machine's network."""
    assert reply.status == 400, reply.body
    assert reply.error["code"] == "unreadable"
    for secret in (
        "127.0.0.1",
        "169.254",
        "hunter2",
        "root:",
        "HTTP 404",
        "refused",
        "/etc",
    ):
        assert secret not in reply.body.decode()
    return str(reply.error["message"])


# Other hosts -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("public")
def test_a_public_picture_is_fetched(server: Running, hostile: int) -> None:
    reply = describe(server, f"http://{PUBLIC}:{hostile}/picture")
    assert reply.json["choices"][0]["message"]["content"] == "a red circle"


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0x7f000001", "0177.0.0.1", "127.1",
        "10.0.0.1", "192.168.0.1", "169.254.169.254", "[fe80::1]", "[fd00::1]", "100.64.0.1", "[64:ff9b::7f00:1]",
    ],
)  # fmt: skip
@pytest.mark.usefixtures("public")
def test_private_hosts_are_never_asked(
    server: Running, hostile: int, host: str
) -> None:
    refused(describe(server, f"http://{host}:{hostile}/secret"))
    assert Hostile.seen == []


def test_urls_are_public_ones_only_where_they_are_allowed(hostile: int) -> None:
    """The configuration's own policy, as ``--allow-urls`` makes it."""
    policy = policy_of(
        ServerConfig(model="m", allow_urls=True, max_file=5, fetch_seconds=2.0)
    )
    assert policy == FetchPolicy(
        allow_http=True,
        allow_private=False,
        allow_files=False,
        max_bytes=5,
        seconds=2.0,
    )
    Hostile.seen.clear()
    with serving(allow_urls=True, fetch_seconds=5.0) as server:
        refused(describe(server, f"http://127.0.0.1:{hostile}/secret"))
    assert Hostile.seen == []


@pytest.mark.parametrize("path", ["loopback", "metadata", "file", "circle"])
@pytest.mark.usefixtures("public")
def test_redirects_are_checked(server: Running, hostile: int, path: str) -> None:
    refused(describe(server, f"http://{PUBLIC}:{hostile}/{path}"))
    assert "/secret" not in Hostile.seen
    assert len(Hostile.seen) <= 4


@pytest.mark.parametrize("path", ["slow", "silent", "endless", "liar", "missing"])
@pytest.mark.usefixtures("public")
def test_size_and_time_are_bounded(server: Running, hostile: int, path: str) -> None:
    began = time.monotonic()
    refused(describe(server, f"http://{PUBLIC}:{hostile}/{path}"))
    assert time.monotonic() - began < 9.5  # the slow ones take ten seconds


@pytest.mark.usefixtures("public")
def test_the_picture_that_cannot_be_fetched_is_named(
    server: Running, hostile: int
) -> None:
    urls = [
        f"http://{host}:{hostile}/picture" for host in (PUBLIC, "127.0.0.1", PUBLIC)
    ]
    reply = server.chat(
        [
            *({"type": "image_url", "image_url": {"url": url}} for url in urls),
            text("what?"),
        ]
    )
    assert refused(reply).startswith("picture 2 of 3: its URL cannot be fetched")
    assert refused(describe(server, urls[1])).startswith(
        "the picture: its URL cannot be fetched"
    )


@pytest.mark.usefixtures("public")
def test_what_is_no_picture_is_not_shown(server: Running, hostile: int) -> None:
    reply = describe(server, f"http://{PUBLIC}:{hostile}/page")
    assert (reply.status, reply.error["code"]) == (400, "InvalidImage")
    assert b"hunter2" not in reply.body


@pytest.mark.usefixtures("public")
def test_a_name_that_changes_its_address_reaches_nothing_else(
    server: Running, hostile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is resolved once for a connection, and the address that was checked is the one that is connected to."""
    resolve, asked = socket.getaddrinfo, []

    def changing(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host != "changing.test":
            return resolve(host, port, *args, **options)
        asked.append(host)
        return resolve(
            PUBLIC if len(asked) == 1 else "127.0.0.1", port, *args, **options
        )

    monkeypatch.setattr(socket, "getaddrinfo", changing)
    reply = describe(server, f"http://changing.test:{hostile}/picture")
    assert reply.json["choices"][0]["message"]["content"] == "a red circle"
    assert len(asked) == 1
    refused(describe(server, f"http://changing.test:{hostile}/secret"))
    assert Hostile.seen == ["/picture"]


@pytest.mark.usefixtures("public")
def test_slow_hosts_hold_up_only_those_who_ask_for_them(
    server: Running, hostile: int
) -> None:
    asking = [
        threading.Thread(
            target=describe, args=(server, f"http://{PUBLIC}:{hostile}/silent/{number}")
        )
        for number in range(12)
    ]
    for thread in asking:
        thread.start()
    began = time.monotonic()
    assert (
        server.chat("count to 5").json["choices"][0]["message"]["content"]
        == "1 2 3 4 5"
    )
    assert time.monotonic() - began < 5
    for thread in asking:
        thread.join(30)


@pytest.mark.parametrize(
    "source",
    [
        "http://example.org/x.png", "ftp://example.org/x.png", "gopher://x/", "file:///etc/passwd", "/etc/passwd",
        "../../etc/passwd", "~/x", "x", "", "\0", "C:\\x.png",
    ],
)  # fmt: skip
def test_by_default_nothing_is_read(locked: Running, source: str) -> None:
    part = {"type": "image_url", "image_url": {"url": source}}
    reply = locked.chat([part, text("describe the picture")], headers=SESAME)
    assert reply.status == 400
    assert reply.error["code"] in ("url", "file")
    assert "/etc" not in reply.body.decode()


# Files -------------------------------------------------------------------------------------------------------------


def test_files_only_below_allowed_folders(tmp_path: Path) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "allowed-not"
    allowed.mkdir()
    other.mkdir()
    (allowed / "circle.png").write_bytes(PICTURE)
    (other / "circle.png").write_bytes(PICTURE)
    (allowed / "link.png").symlink_to(other / "circle.png")
    os.mkfifo(allowed / "pipe.png")
    with serving(allow_dirs=(allowed,)) as server:
        for right in (f"file://{allowed}/circle.png", f"{allowed}/circle.png"):
            assert (
                describe(server, right).json["choices"][0]["message"]["content"]
                == "a red circle"
            )
        for wrong in (
            f"{other}/circle.png",
            f"{allowed}/../allowed-not/circle.png",
            f"{allowed}/link.png",
            f"{allowed}/missing.png",
            f"{allowed}/pipe.png",
            f"{allowed}",
            "/etc/passwd",
            "file:///etc/passwd",
        ):
            reply = describe(server, wrong)
            assert reply.status == 400, wrong
            assert str(tmp_path) not in reply.body.decode()
        assert describe(server, "http://127.0.0.1/x.png").error["code"] == "url"


def test_messages_for_strangers_have_no_paths() -> None:
    assert without_paths("no /home/ann/models/x.safetensors here") == "no (a path) here"
    assert without_paths("see file:///etc/passwd") == "see (a file)"
    assert without_paths("[Errno 2] '/tmp/a b'") == "[Errno 2] '(a path) b'"
    assert (
        without_paths("either/or at 1/2, http://example.org/a/b")
        == "either/or at 1/2, http://example.org/a/b"
    )
    assert len(without_paths("x" * 10_000)) == 600


@pytest.mark.parametrize(
    "wrong",
    [
        r"\d\d\w+/[a-z",
        "/home/ann/é/x([a",
        r"(\\server\share|file:///etc/passwd[a",
        "a" * 60 + r"\b\c\d[z",
    ],
)
def test_what_a_client_sent_comes_back_as_it_was(locked: Running, wrong: str) -> None:
    said = locked.chat("x", guided_regex=wrong, headers=SESAME).error["message"]
    assert "(a " not in said and wrong[-8:].replace("/", r"\/") in said, said
    said = locked.chat("x", headers=SESAME, **{wrong: 1}).error["message"]
    assert "(a " not in said and wrong[-8:] in said, said


def test_paths_of_the_machine_do_not_come_back_beside_what_was_sent() -> None:
    sent = rb'{"guided_regex": "\\d/home/ann/x"}'
    said = r"\d/home/ann/x, which /home/ann/models/y and \d/home/ann say"
    assert (
        without_paths(said, sent)
        == r"\d/home/ann/x, which (a path) and \d/home/ann say"
    )


# Who may come in ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with serving(api_key=KEY) as running:
        yield running


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic s\u00e9same",
        "s\u00e9same",
        "Bearer s\u00e9same2",
    ],
)
def test_a_wrong_key_is_refused(locked: Running, given: str | None) -> None:
    headers = (
        {} if given is None else {"Authorization": given.encode().decode("latin-1")}
    )
    for method, path in (
        ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/stats"), ("GET", "/openapi.json"), ("GET", "/no/such"),
        ("POST", "/v1/chat/completions"), ("GET", "/page/../v1/models"), ("GET", "//v1/models"),
    ):  # fmt: skip
        reply = locked.ask(
            method, path, {} if method == "POST" else None, headers=headers
        )
        assert reply.status in (401, 404), path
        assert (reply.status == 404) == path.startswith("/page/")
        assert b"qwen2_vl" not in reply.body


def test_the_right_key_is_let_in(locked: Running) -> None:
    assert locked.ask("GET", "/v1/models", headers=SESAME).status == 200
    assert locked.ask("GET", "/health").status == 200
    assert locked.ask("GET", "/ready").status == 200
    assert locked.ask("GET", "/").status == 200


def test_keys_are_compared_in_constant_time(
    monkeypatch: pytest.MonkeyPatch, locked: Running
) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare = edge.hmac.compare_digest

    def noting(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return compare(a, b)

    monkeypatch.setattr(edge.hmac, "compare_digest", noting)
    locked.ask("GET", "/v1/models", headers={"Authorization": "Bearer x"})
    assert [len(one) for one in compared[0]] == [32, 32]


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil",
        "",
        "[::2]",
        "evil.example:80",
    ],
)
def test_other_host_names_are_refused(server: Running, host: str) -> None:
    """A page of another site whose name is made to resolve to this machine."""
    assert server.ask("GET", "/v1/models", headers={"Host": host}).status == 403


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "LOCALHOST:1234", "[::1]:80"]
)
def test_own_host_names_are_let_in(server: Running, host: str) -> None:
    assert server.ask("GET", "/v1/models", headers={"Host": host}).status == 200


def test_other_sites_get_no_leave_to_read(server: Running) -> None:
    origin = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for reply in (
        server.ask("OPTIONS", "/v1/chat/completions", headers=origin),
        server.chat("count to 3", headers=origin),
    ):
        assert not [name for name in reply.headers if name.startswith("access-control")]
    simple = server.ask(
        "POST",
        "/v1/chat/completions",
        b"{}",
        headers={"Content-Type": "text/plain", **origin},
    )
    assert simple.status == 415


def test_pages_may_load_nothing_from_elsewhere(server: Running) -> None:
    headers = server.ask("GET", "/").headers
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert headers["x-content-type-options"] == "nosniff"
    assert "server" not in headers


# Exhaustion --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    with serving(
        max_body=100_000, max_images=2, max_videos=0, max_choices=2, max_prompts=2
    ) as running:
        yield running


def test_large_bodies_are_refused(small: Running) -> None:
    reply = small.ask("POST", "/v1/chat/completions", b" " * 100_001)
    assert reply.status == 413
    connection = socket.create_connection(("127.0.0.1", small.port), timeout=20)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    for _ in range(20):
        connection.sendall(b"2710\r\n" + b" " * 10_000 + b"\r\n")
    connection.sendall(b"0\r\n\r\n")
    assert b"413" in connection.recv(1000)
    connection.close()
    assert small.chat("count to 3").status == 200


def test_a_client_that_still_sends_gets_its_refusal(small: Running) -> None:
    """Neither "broken pipe" nor "connection reset": clients read an answer when they have sent their body."""
    body = b" " * 20_000_000
    kind = {"Content-Type": "application/json"}
    url = f"{small.url}/v1/chat/completions"
    for _ in range(3):
        assert httpx.post(url, content=body, headers=kind).status_code == 413
        assert small.ask("POST", "/v1/chat/completions", body).status == 413
    client = openai.OpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=0)
    turn: Any = {"role": "user", "content": "x" * 20_000_000}
    with pytest.raises(openai.APIStatusError, match="larger than 100,000 bytes"):
        client.chat.completions.create(model="any", messages=[turn])


@pytest.mark.parametrize("more", [b"", b"Expect: 100-continue\r\n"])
def test_a_client_that_says_no_length_gets_its_refusal(
    small: Running, more: bytes
) -> None:
    """What is refused on its way is read to its end, too."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", small.port), timeout=20) as raw:
        raw.sendall(head + more + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(200):
            raw.sendall(b"186a0\r\n" + b" " * 100_000 + b"\r\n")
        raw.sendall(b"0\r\n\r\n")
        answer = b"".join(iter(partial(raw.recv, 4096), b""))
    assert b" 413 " in answer
    assert b"larger than 100,000 bytes" in answer


def test_a_refused_body_is_not_waited_for_long(
    small: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes at once, its end when the client has said nothing for a while, or has talked for too long."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    for name, dripped in (("LINGER_SILENCE", b""), ("LINGER_SECONDS", b" ")):
        with monkeypatch.context() as patched:
            patched.setattr(edge, name, 0.5)
            raw = socket.create_connection(("127.0.0.1", small.port), timeout=20)
            with raw:
                raw.sendall(head + b"Content-Length: 9000000\r\n\r\n")
                assert b" 413 " in raw.recv(4096).splitlines()[0]
                with suppress(ConnectionError):
                    while dripped:
                        raw.sendall(dripped)
                        time.sleep(0.02)
                with suppress(ConnectionResetError):  # by what it dripped last
                    assert b"HTTP/1.1" not in b"".join(
                        iter(partial(raw.recv, 999), b"")
                    )
    with socket.create_connection(("127.0.0.1", small.port), timeout=2) as raw:
        raw.sendall(head + b"Content-Length: 9000000\r\nExpect: 100-continue\r\n\r\n")
        answer = b"".join(iter(partial(raw.recv, 4096), b""))
    assert b" 413 " in answer.splitlines()[0], "nothing of it will come"


def test_bodies_that_do_not_come_are_not_waited_for(
    small: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "BODY_SECONDS", 0.5)
    connection = socket.create_connection(("127.0.0.1", small.port), timeout=20)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
    assert b"408" in connection.recv(1000)
    connection.close()


def test_heads_that_do_not_come_are_not_waited_for(
    small: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then keeps no place: neither on a new connection nor on one that was used before."""
    monkeypatch.setattr(run, "HEAD_SECONDS", 0.5)
    health = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    for before in (b"", health + b"\r\n"):
        connection = socket.create_connection(("127.0.0.1", small.port), timeout=60)
        connection.sendall(before)
        if before:
            assert b"200" in connection.recv(4000)
        with suppress(ConnectionError):
            for byte in health * 20:
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
            pytest.fail("the connection was kept")
        connection.close()
    assert small.ask("GET", "/health").status == 200


def test_answers_that_nobody_reads_are_not_kept(
    small: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the connection was to be closed or kept: what was written for it stays for so long and no longer."""
    monkeypatch.setattr(run, "UNREAD_SECONDS", 0.3)
    monkeypatch.setattr(small.server.service.metrics, "text", lambda: bytes(50 << 20))
    connections = small.server.server_state.connections
    wait_until(lambda: not connections, "the other tests' connections to be gone")
    for more in (b"", b"Connection: close\r\n"):
        with socket.create_connection(
            ("127.0.0.1", small.port), timeout=60
        ) as connection:
            connection.sendall(
                b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n" + more + b"\r\n"
            )
            wait_until(lambda: bool(connections), "the connection")
            wait_until(lambda: not connections, "the connection to be given up")
    assert len(small.ask("GET", "/metrics").body) == 50 << 20  # who reads gets all


def test_a_form_that_takes_long_to_check_holds_up_nobody(
    small: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks, is_done = Forms.check, threading.Event()

    def slowly(self: Forms, params: SamplingParams) -> int:
        assert params.form is None or is_done.wait(60)
        return checks(self, params)

    monkeypatch.setattr(Forms, "check", slowly)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(small.chat, "count to 3", guided_choice=["yes", "no"])
        wait_until(lambda: bool(small.server.service._visits), "the form to come in")
        assert small.chat("count to 3").status == 200
        assert not held.done()
        is_done.set()
        assert held.result(60).status == 200


def test_bodies_of_all_requests_are_bounded_together(hostile: int) -> None:
    """Each may be small enough, and all of them too much: whoever comes then is sent away until one is gone."""
    policy = FetchPolicy(allow_http=True, allow_private=True, allow_files=False)
    with serving(policy=policy, max_body=100_000, max_held=150_000) as server:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        connection.sendall(
            f"{head}Content-Length: 99000\r\n\r\n".encode() + b" " * 98_000
        )
        body = (
            b" " * 70_000 + b'{"messages": [{"role": "user", "content": "count to 3"}]}'
        )
        replies: list[Reply] = []

        def ask(status: int) -> bool:
            replies.append(server.ask("POST", "/v1/chat/completions", body))
            return replies[-1].status == status

        wait_until(lambda: ask(429), "the first body to be counted")
        assert replies[-1].error["code"] == "busy"
        assert replies[-1].headers["retry-after"] == "1"
        connection.close()
        wait_until(lambda: ask(200), "the first body to be gone")
        urls = [
            {
                "type": "image_url",
                "image_url": {"url": f"http://127.0.0.1:{hostile}/large"},
            }
        ] * 2
        assert server.chat(urls).status == 429, "what is fetched counts as well"
        assert server.chat("count to 3").status == 200


def test_counts_are_bounded(small: Running) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    clip = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aGVsbG8="}}
    assert "at most 2" in small.chat([part] * 3).error["message"]
    assert "at most 0" in small.chat([clip]).error["message"]
    assert small.chat("count to 3", n=3).status == 400
    assert (
        small.ask("POST", "/v1/completions", {"prompt": ["a", "b", "c"]}).status == 400
    )


def test_a_prompt_beyond_the_context_is_refused(server: Running) -> None:
    reply = server.chat("repeat: " + "a " * 5000)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


def test_a_bomb_of_a_picture_is_refused(server: Running) -> None:
    import base64

    bomb = base64.b64encode(
        (IMAGES / "awkward" / "decompression_bomb.png").read_bytes()
    ).decode()
    reply = describe(server, f"data:image/png;base64,{bomb}")
    assert (reply.status, reply.error["code"]) == (400, "InvalidImage")


def test_connections_that_say_nothing_stop_nobody(server: Running) -> None:
    idle = [
        socket.create_connection(("127.0.0.1", server.port), timeout=5)
        for _ in range(50)
    ]
    try:
        assert server.chat("count to 3").status == 200
    finally:
        for connection in idle:
            connection.close()


@pytest.mark.parametrize(
    "said", [b"", b"GET /health HT", b"POST /v1/chat/completions HTTP/1.1\r\n"], ids=len
)
def test_connections_without_a_request_make_room(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """However many a client opens and leaves: the oldest of them go, and nobody else waits."""
    monkeypatch.setattr(run, "MAX_PER_ADDRESS", 20)
    if said.startswith(b"POST"):
        said += b"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    with serving() as running:
        held = []
        for _ in range(60):
            held.append(
                socket.create_connection(("127.0.0.1", running.port), timeout=5)
            )
            held[-1].sendall(said)
        begin = time.monotonic()
        assert running.ask("GET", "/health").status == 200
        assert running.chat("count to 3").status == 200
        assert time.monotonic() - begin < 20  # not HEAD_SECONDS, nor BODY_SECONDS
        wait_until(
            lambda: len(running.server.server_state.connections) <= 20,
            "the oldest to be closed",
        )
        held[0].settimeout(5)
        with suppress(ConnectionResetError):
            assert held[0].recv(1) == b""
        for connection in held:
            connection.close()


def test_places_are_shared_out_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    class Peer:
        def __init__(self, address: str, *, is_waited_for: bool = True) -> None:
            self.address = address
            self.is_waited_for = is_waited_for
            self.is_open = True
            self.transport = self

        def abort(self) -> None:
            self.is_open = self.is_waited_for = False

    monkeypatch.setattr(run, "MAX_CONNECTIONS", 10)
    monkeypatch.setattr(run, "MAX_PER_ADDRESS", 6)
    monkeypatch.setattr(run, "RESERVED", 2)
    connections: Any = run.Connections(20_000)
    peers: list[Peer] = []

    def come(address: str, **how: Any) -> Peer:
        peers.append(Peer(address, **how))
        connections.add(peers[-1])
        for one in [one for one in peers if not one.is_open]:
            connections.remove(one)
            peers.remove(one)
        return peers[-1]

    first = [come("a") for _ in range(6)]
    connections.touch(first[0])
    seventh = come("a")
    assert [one.is_open for one in (*first, seventh)] == [
        True,
        False,
        True,
        True,
        True,
        True,
        True,
    ]
    others = [come("b") for _ in range(4)]
    assert (come("c").is_open, first[2].is_open) == (True, False), (
        "of the address that has most"
    )
    for one in peers:
        one.is_waited_for = False
    assert all(one.is_open for one in others)
    assert [come("d").is_open for _ in range(2)] == [True, True], (
        "kept for those who ask whether it lives"
    )
    last = Peer("d", is_waited_for=False)
    connections.add(last)
    assert not last.is_open


@pytest.mark.parametrize(
    ("how", "least"), [("-Sn 256", 300), ("-n 256", 64), ("-n 64", 16)]
)
def test_few_open_files_do_not_close_the_door(
    tmp_path: Path, how: str, least: int
) -> None:
    """A Mac's soft limit is 256: it is raised before it is read, and where it cannot be, connections get a part of it."""
    with served_by_command(tmp_path, f"ulimit {how}") as running:
        held = [
            socket.create_connection(("127.0.0.1", running.port), timeout=20)
            for _ in range(least)
        ]
        request = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        for connection in held:
            connection.sendall(request)
            assert b" 200 " in connection.recv(4000).splitlines()[0]
        for connection in held:
            connection.close()
        assert (
            running.chat("count to 3").json["choices"][0]["message"]["content"]
            == "1 2 3"
        )


@contextmanager
def served_by_command(folder: Path, before: str, *flags: str) -> Iterator[Running]:
    """``vlm-batch serve`` in a shell that does something ``before``."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vlm_batch",
        "serve",
        "--port",
        str(port),
        "--shutdown-timeout",
        "1",
        *flags,
    ]
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            ["sh", "-c", f"{before}; exec {shlex.join(command)}"],
            stdout=said,
            stderr=said,
        )
        try:
            running = Running(None, port)  # type: ignore[arg-type]
            wait_until(
                lambda: process.poll() is not None or is_healthy(running),
                "the server to answer",
            )
            assert process.poll() is None, (folder / "said").read_text()
            yield running
        finally:
            process.kill()
            process.wait()


def is_healthy(running: Running) -> bool:
    with suppress(OSError, HTTPException):
        return running.ask("GET", "/health").status == 200
    return False


@pytest.mark.parametrize(("proxies", "number"), [((), 1), (("127.0.0.0/8",), 3)])
def test_only_named_proxies_say_who_the_client_is(
    proxies: tuple[str, ...], number: int
) -> None:
    """Otherwise a local process counts as as many clients as it likes."""
    seen: set[int] = set()
    visit = Service.visit

    def noted(self: Service, place: Visit) -> Any:
        seen.add(place.client)
        return visit(self, place)

    with pytest.MonkeyPatch.context() as patched, serving(proxies=proxies) as running:
        patched.setattr(Service, "visit", noted)
        for address in ("10.1.1.1", "10.1.1.2", "10.1.1.3"):
            assert (
                running.chat(
                    "count to 3", max_tokens=1, headers={"X-Forwarded-For": address}
                ).status
                == 200
            )
    assert len(seen) == number


@pytest.mark.parametrize("proxies", [("everyone",), ("10.0.0.1/8",), ("",), ("*",)])
def test_proxies_are_addresses(proxies: tuple[str, ...]) -> None:
    with pytest.raises(InvalidConfig, match="--proxies"):
        ServerConfig(model="m", proxies=proxies)


def test_probes_are_answered_when_all_else_is_full(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "MAX_REQUESTS", 0)
    assert server.ask("GET", "/health").status == 200
    assert server.ask("GET", "/ready").status == 200
    refused = server.chat("count to 3")
    assert (refused.status, refused.error["code"]) == (503, "busy")


def test_a_body_with_two_lengths_closes_the_connection(server: Running) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw:
        raw.sendall(
            head
            + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\n\r\n"
        )
        answer = b"".join(iter(lambda: raw.recv(4096), b""))
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b" 400 " in answer.splitlines()[0]
    assert b"Transfer-Encoding; send one" in answer


def test_a_slash_too_many_leads_nowhere(server: Running) -> None:
    for path in ("/v1/models/", "/health/", "/v1/chat/completions/"):
        reply = server.ask("GET", path, headers={"Host": "localhost"})
        assert (reply.status, reply.headers.get("location")) == (404, None)


def test_a_form_with_files_gets_its_hint(server: Running) -> None:
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    for path, hint in (
        ("/v1/audio/transcriptions", "input_audio"),
        ("/v1/files", "data URIs"),
    ):
        reply = server.ask("POST", path, b"--x--", headers=kind)
        assert (reply.status, hint in reply.error["message"]) == (404, True)
    assert (
        server.ask("POST", "/v1/chat/completions", b"--x--", headers=kind).status == 415
    )


def test_large_bodies_are_read_beside_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, str]] = []

    def noted(data: bytes, kind: Any) -> Any:
        read.append((len(data), threading.current_thread().name))
        return read_body(data, kind)

    monkeypatch.setattr(bodies, "read_body", noted)
    large = {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + "A" * 500_000},
    }
    server.chat([large], max_tokens=1)
    server.chat("count to 3", max_tokens=1, allowed_token_ids=list(range(500)) * 80)
    assert read[0][0] > 500_000
    assert read[0][1] == "test-server", "a picture is one value, which costs nothing"
    assert 100_000 < read[1][0] < 500_000
    assert read[1][1] != "test-server"


@pytest.mark.usefixtures("public")
def test_cheap_refusals_come_before_dear_ones(
    server: Running, hostile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the fields alone tell is said before a picture is fetched; who has no room is told before a body is parsed."""
    part = {
        "type": "image_url",
        "image_url": {"url": f"http://{PUBLIC}:{hostile}/picture"},
    }
    assert server.chat([part], n=999).error["param"] == "n"
    assert Hostile.seen == []

    def full(self: Service) -> None:
        raise ApiError(429, "full", code="busy")

    monkeypatch.setattr(Service, "check_memory", full)
    monkeypatch.setattr(bodies, "read_body", pytest.fail)
    assert server.chat("count to 3").status == 429


@pytest.mark.usefixtures("public")
def test_every_shared_thread_knows_its_clients(
    server: Running, hostile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = Pool.submit
    asked: dict[str, set[int]] = {}

    def noted(self: Pool, *given: Any, **named: Any) -> Any:
        asked.setdefault(self._name, set()).add(named.get("client", 0))
        return submit(self, *given, **named)

    monkeypatch.setattr(Pool, "submit", noted)
    url = {
        "type": "image_url",
        "image_url": {"url": f"http://{PUBLIC}:{hostile}/picture"},
    }
    assert (
        server.chat(
            [url, text("describe the picture")],
            allowed_token_ids=list(range(500)) * 100,
        ).status
        == 200
    )
    assert server.chat("count to 3", guided_choice=["yes", "no"]).status == 200
    assert {
        "vlm-batch-media",
        "vlm-batch-bodies",
        "vlm-batch-submit",
        "vlm-batch-submit-form",
    } <= asked.keys()
    # called by the one thread that submits forms, in the turns of its clients
    asked.pop("vlm-batch-form-check")
    assert not {name for name, clients in asked.items() if 0 in clients}


def test_bodies_take_turns_by_client_and_by_cost() -> None:
    """Behind a dozen dear bodies of one client, another's is next, and then the cheapest of its own."""
    order: list[str] = []
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert go_on.wait(30)

    def entry(client: int, num_values: int) -> edge.Entry:
        return edge.Entry(
            "x",
            "POST",
            "/",
            "",
            edge.ByteQuota(0),
            number=client,
            num_values=num_values,
        )

    async def read() -> None:
        reader = bodies.Bodies()
        first = asyncio.ensure_future(reader.read(entry(1, 200_000), hold))
        await asyncio.to_thread(held.wait, 30)
        asked = [("dear", 1, 200_000)] * 6 + [
            ("cheaper", 1, 20_000),
            ("another's", 2, 200_000),
        ]
        rest = [
            asyncio.ensure_future(
                reader.read(entry(client, values), order.append, name)
            )
            for name, client, values in asked
        ]
        # so that they are submitted, and the first has taken more than the others will
        await asyncio.sleep(0.05)
        go_on.set()
        await asyncio.gather(first, *rest)
        reader.close()

    asyncio.run(read())
    assert order == ["another's", "cheaper", *["dear"] * 6]


def test_a_body_whose_client_has_left_is_not_read() -> None:
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert go_on.wait(30)

    async def read() -> None:
        reader = bodies.Bodies()
        entry = edge.Entry("x", "POST", "/", "", edge.ByteQuota(0), num_values=200_000)
        first = asyncio.ensure_future(reader.read(entry, hold))
        await asyncio.to_thread(held.wait, 30)
        left = asyncio.ensure_future(reader.read(entry, pytest.fail))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        go_on.set()
        await first
        assert await reader.read(entry, lambda: 7) == 7
        reader.close()

    asyncio.run(read())


def test_a_storm_of_clients_that_leave_leaves_nothing_behind(server: Running) -> None:
    body = b'{"messages":[{"role":"user","content":"count to 20"}],"stream":true,"ignore_eos":true,"max_tokens":1500}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    for number in range(40):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=5)
        connection.sendall(
            f"{head}Content-Type: application/json\r\n\r\n".encode()
            + body[: len(body) - number % 2]
        )
        connection.close()
    stats = server.server.service.stats
    wait_until(
        lambda: (
            (now := stats()) is not None
            and now.queued + now.waiting + now.prefilling + now.decoding == 0
        ),
        "the batch to be empty",
    )
    wait_until(lambda: not server.server.service._visits, "nobody to be there")
    assert server.chat("count to 3").status == 200


# What a body costs -------------------------------------------------------------------------------------------------

TURN = {"role": "user", "content": "count to 3"}


def count_errors(body: dict[str, Any]) -> int:
    try:
        ChatRequest.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


def test_the_thread_of_large_bodies_rests_for_as_long_as_each_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    rests: list[float] = []
    monkeypatch.setattr(
        pool, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=rests.append)
    )

    def take(seconds: float) -> None:
        now[0] += seconds

    async def read() -> None:
        reader = bodies.Bodies()
        entry = edge.Entry("x", "POST", "/", "", edge.ByteQuota(0), num_values=200_000)
        for seconds in (2.0, 0.5, 0.0):
            await reader.read(entry, take, seconds)
        await asyncio.to_thread(
            wait_until, lambda: len(rests) == 3, "the thread to rest"
        )
        reader.close()

    asyncio.run(read())
    assert rests == [2.0, 0.5, 0.0]


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": ["a"] * 200_000},
        {"stop_token_ids": ["a"] * 200_000},
        {"logit_bias": dict.fromkeys(map(str, range(200_000)), "a")},
        {f"x{index}": 1 for index in range(200_000)},
        {"tools": [{"type": "function"}] * 60_000},
        {"tools": [{"type": "function", "function": {"name": "f"}}] * 600},
        {"messages": [{"role": "user"}] * 60_000},
        {"messages": [TURN] * 5000},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x"}] * 1025}
            ]
        },
        {"bad_words": ["x y"] * 1025},
        {"guided_choice": ["x"] * 5000},
        {"documents": [{}] * 1025},
        {"documents": [{"a": {str(index): 1 for index in range(200_000)}}]},
        {"chat_template_kwargs": {str(index): 1 for index in range(200)}},
        {"chat_template_kwargs": {"a": [1] * 20_000}},
        {"metadata": {str(index): "x" for index in range(17)}},
        {"allowed_token_ids": [1] * 300_000},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_wrong_and_long_lists_cost_little(
    server: Running, fields: dict[str, Any]
) -> None:
    """pydantic makes an error of each wrong value; with hundreds of thousands of them nobody else was heard for seconds."""
    body = {"messages": [TURN], "max_tokens": 2, **fields}
    assert count_errors(body) < 10
    reply = server.ask("POST", "/v1/chat/completions", body)
    assert reply.status in (400, 413), reply.body[:300]
    assert len(reply.body) < 2000


def test_what_is_nested_too_deeply_is_refused(server: Running) -> None:
    """Wherever Python's stack ends: in the parser, in pydantic, in a template, in what looks through texts."""
    for depth in (250, 500, 900, 990, 5000, 50_000):
        call = {
            "id": "1",
            "type": "function",
            "function": {"name": "f", "arguments": nested(depth)},
        }
        chat = [
            TURN,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ]
        assert server.ask(
            "POST", "/v1/chat/completions", {"messages": chat, "max_tokens": 2}
        ).status in (200, 400)
        for name in (
            "chat_template_kwargs",
            "documents",
            "tools",
            "response_format",
            "messages",
        ):
            body = f'{{"messages": [{{"role": "user", "content": "x"}}], "max_tokens": 2, "{name}": {nested(depth)}}}'
            assert server.ask("POST", "/v1/chat/completions", body.encode()).status in (
                400,
                413,
            )


@pytest.mark.parametrize(
    "ids",
    [
        {"\u0663": 1},
        {"3_0": 1},
        {" 3": 1},
        {"3": 1, "03": 2},
        {"-1": 1},
        {"9" * 5000: 1},
    ],
    ids=ascii,
)
def test_a_bias_is_of_a_token(server: Running, ids: dict[str, int]) -> None:
    reply = server.chat("count to 3", logit_bias=ids, max_tokens=3)
    assert (reply.status, reply.error["param"]) == (400, "logit_bias")


@pytest.mark.parametrize("value", [-1, 2**40, 1.5, "x", True, [], {}, [{}]], ids=str)
def test_no_value_of_any_field_is_a_fault(server: Running, value: Any) -> None:
    """Each field by itself, numbers that no field takes among the values: 200, or a refusal that is about something."""
    kinds = (
        ("/v1/chat/completions", ChatRequest, {"messages": [TURN]}),
        ("/v1/completions", CompletionRequest, {"prompt": "x"}),
    )
    for path, kind, least in kinds:
        for name in kind.model_fields:
            reply = server.ask("POST", path, {"max_tokens": 1, **least, name: value})
            assert reply.status in (200, 400, 404), (name, value, reply.body)
            assert reply.status == 200 or reply.error["message"], (name, value)


HALF = "\ud800"


@pytest.mark.parametrize(
    "fields",
    [
        {HALF: 1},
        {"model": HALF},
        {"stop": [HALF]},
        {"bad_words": [HALF]},
        {"guided_regex": HALF},
        {"guided_choice": [HALF]},
        {"guided_grammar": f'start: "{HALF}"'},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"enum": [HALF]}},
            }
        },
        {"tools": [{"type": "function", "function": {"name": HALF}}]},
        {"chat_template_kwargs": {HALF: 1}},
        {"logit_bias": {HALF: 1}},
        {"tool_choice": {"type": "function", "function": {"name": HALF}}},
        {"messages": [{"role": HALF, "content": "x"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": HALF}]}
            ]
        },
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": HALF, "arguments": HALF}}],
                }
            ]
        },
    ],
    ids=ascii,
)
def test_half_a_character_is_the_requests_fault(
    server: Running, fields: dict[str, Any]
) -> None:
    """It is no text: no tokenizer takes it, and no message can be written with it as it is."""
    reply = server.ask(
        "POST", "/v1/chat/completions", {"messages": [TURN], "max_tokens": 2, **fields}
    )
    assert reply.status in (400, 404), reply.body
    assert reply.error["message"]
    assert server.chat("count to 3", user=HALF, max_tokens=2).status == 200


def test_refusals_speak_the_language_of_the_wire(server: Running) -> None:
    """They name what was sent, and what a client can do: no argument, class or option of the library."""
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "obect"}},
    }
    large = "data:image/png;base64," + "A" * (2 << 20)
    asked: list[tuple[Any, dict[str, Any], str | None, str]] = [
        ("a<|im_end|>b", {}, "messages", "leave it out"),
        ("<|image_pad|>", {}, "messages", "/v1/completions"),
        ("x", {"response_format": form}, "response_format", "response_format: "),
        ("x", {"response_format": form, "guided_regex": "a"}, "response_format", "response_format and guided_regex"),
        ("x", {"guided_choice": []}, "guided_choice", "guided_choice is empty"),
        ("x", {"guided_grammar": "start: ?"}, "guided_grammar", "guided_grammar: "),
        ("x", {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "chat_template_kwargs holds"),
        ("x", {"chat_template_kwargs": {"zzz": True}}, "chat_template_kwargs", "does not read"),
        ("x", {"allowed_token_ids": [99999]}, "allowed_token_ids", "this model has"),
        ("x", {"logit_bias": {"99999": 1}}, "logit_bias", "this model has"),
        ("word " * 5000, {}, "messages", "the model's context holds"),
        ([text("x"), {"type": "image_url", "image_url": large}], {}, "messages", "image"),
    ]  # fmt: skip
    ours = (
        "template=",
        "FetchPolicy",
        "SamplingParams",
        "json_schema:",
        "regex:",
        "Template(",
        "Limits.",
    )
    for content, fields, param, said in asked:
        reply = server.chat(content, max_tokens=3, **fields)
        assert reply.status == 400, (content[:20], reply.body)
        assert said in reply.error["message"] or isinstance(content, list)
        assert reply.error["param"] == param
        assert not [word for word in ours if word in reply.error["message"]], (
            reply.error["message"]
        )
    reply = server.ask(
        "POST", "/v1/completions", {"prompt": [99999999999], "max_tokens": 2}
    )
    assert (reply.status, reply.error["param"]) == (400, "prompt")


def test_a_wide_form_fails_alone_and_as_the_requests_fault(server: Running) -> None:
    reply = server.chat("count to 3", guided_regex="(a?){500}a{500}")
    assert (reply.status, reply.error["param"]) == (400, "guided_regex")
    assert server.chat("count to 3").json["choices"][0]["message"]["content"] == "1 2 3"


# Ways around the key -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "get"],
)
def test_no_method_and_no_spelling_of_a_path_goes_around_the_key(
    locked: Running, method: str
) -> None:
    """Whatever is not the page's own file, or whether the server lives, is refused before it is looked at."""
    paths = (
        "/metrics",
        "/stats",
        "/openapi.json",
        "/v1/models",
        "/v1/chat/completions",
        "/v1/models/qwen2_vl",
    )
    odd = (
        "//v1/models",
        "/page/../v1/models",
        "/page/%2e%2e/v1/models",
        "/v1/models/",
        "/health/",
        "/./v1/models",
        "/%2fv1/models",
    )
    for path in (
        *paths,
        *odd,
        "/page",
        "/Page/app.js",
        "/healthy",
        "/?/v1/models",
        "/v1/models?x=/page/",
    ):
        reply = locked.ask(
            method,
            path,
            headers={"X-Original-URL": "/health", "X-Forwarded-For": "127.0.0.1"},
        )
        is_page = path.startswith(("/page/", "/?"))
        assert reply.status in ((401, 404, 405, 415, 200) if is_page else (401,)), (
            path,
            reply.status,
        )
        assert b"qwen2_vl" not in reply.body
        assert b"vllm:" not in reply.body


def test_files_are_named_by_no_way_out_of_their_folder(tmp_path: Path) -> None:
    inside, secret = tmp_path / "in", tmp_path / "secret.png"
    inside.mkdir()
    for path in (inside / "a.png", secret):
        path.write_bytes(PICTURE)
    (inside / "link.png").symlink_to(secret)
    (inside / "up").symlink_to(tmp_path)
    with serving(allow_dirs=(inside,)) as server:
        assert describe(server, str(inside / "a.png")).status == 200
        assert describe(server, (inside / "a.png").as_uri()).status == 200
        ways = [
            f"{inside}/../secret.png",
            f"{inside}/up/secret.png",
            f"{inside}/link.png",
            f"file://{inside}/../secret.png",
            f"file://{inside}/%2e%2e/secret.png",
            f"file://localhost{inside}/%2e%2e%2fsecret.png",
            f"{inside}/./.././secret.png",
            f"{inside}/a.png\0/../../secret.png",
            f"~root/../{secret}",
            f"{inside}-other/../secret.png",
        ]
        for way in ways:
            refused(describe(server, way))
