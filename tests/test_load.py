"""``vlm-batch bench --url`` against this library's server, and against servers that misbehave."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.serving import Running, serving
from vlm_batch.cli import bench
from vlm_batch.cli import main as cli
from vlm_batch.cli.load import (
    BenchedServer,
    Load,
    Report,
    TimedAnswer,
    measure,
    spread,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@contextmanager
def scripted(reply: bytes) -> Iterator[str]:
    """A server that answers everything with the same bytes, until somebody connects and says nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60)

    def answer() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(60)
                held = b""
                while b"\r\n\r\n" not in held:
                    received = connection.recv(65536)
                    if not received:
                        return
                    held += received
                head, _, rest = held.partition(b"\r\n\r\n")
                length = int(
                    head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
                )
                while len(rest) < length:
                    rest += connection.recv(65536)
                connection.sendall(reply)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    # closing a socket does not end another thread's accept
    socket.create_connection(listener.getsockname()).close()
    thread.join(60)
    assert not thread.is_alive()
    listener.close()


def events(*texts: str, end: str = "data: [DONE]\n\n") -> bytes:
    lines = "".join(f"data: {text}\n\n" for text in texts) + end
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        + lines.encode()
    )


def test_from_the_command_line(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "figures.json"
    command = [
        "bench",
        "--url",
        server.url,
        "--model",
        "qwen2_vl",
        "--requests",
        "12",
        "--concurrency",
        "6",
    ]
    small = [
        "--sizes",
        "64x48",
        "112x56",
        "--prompt-words",
        "12",
        "--answer-tokens",
        "8",
        "--check",
        "4",
        "--pictures",
        "0.5",
    ]
    assert cli.main([*command, *small, "--ignore-eos", "--json", str(record)]) == 0
    found = json.loads(record.read_text())
    assert found["requests"] == 12
    assert found["failed"] == 0
    assert found["pictures"] == 6
    assert found["answer_tokens"] == 8
    assert found["checked"] == found["equal_to_alone"] == 4
    assert (
        0
        < found["ttft"]["p50"]
        <= found["ttft"]["p95"]
        <= found["ttft"]["max"]
        <= found["whole"]["max"]
    )
    out = capsys.readouterr().out
    for shown in (
        "12 requests",
        "6 with a picture",
        "6 at a time",
        "4 of 4 answers equal",
        "to the first token",
    ):
        assert shown in out


def test_arrivals_by_chance(server: Running, tmp_path: Path) -> None:
    some = Load(
        requests=8,
        rate=200.0,
        sizes=((56, 56),),
        prompt_words=(4, 4),
        answer_tokens=(4, 4),
    )
    report = measure(BenchedServer(f"{server.url}/v1", "qwen2_vl"), some)
    found = report.figures()
    assert found["failed"] == 0
    assert found["arrivals_per_s"] == 200.0
    assert found["checked"] == 0
    pytest.importorskip("matplotlib", reason="pictures need the extra bench")
    bench.plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_refusals_are_failures(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "bench",
        "--url",
        server.url,
        "--model",
        "other",
        "--requests",
        "2",
        "--check",
        "0",
    ]
    assert cli.main(command) == 1
    assert "HTTP 404" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (
            b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\noops",
            "HTTP 500: oops",
        ),
        (b"nonsense\r\n\r\n", "BadStatusLine"),
        (b"", "RemoteDisconnected"),
        (events('{"error": {"message": "out of memory"}}'), "out of memory"),
        (events("{broken"), "JSONDecodeError"),
        (events('{"choices": [{"delta": {"content": "x"}}]}', end=""), "broke off"),
    ],
    ids=["500", "no http", "nothing", "error", "no json", "cut"],
)
def test_servers_that_misbehave(reply: bytes, error: str) -> None:
    with scripted(reply) as url:
        answer = BenchedServer(url, "m", timeout=5).ask(b"{}")
    assert answer.error is not None
    assert error in answer.error


def test_other_servers_dialects() -> None:
    """Reasoning counts, usage may be missing, and so may the end mark."""
    lines = (
        '{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        '{"choices": [{"delta": {"reasoning": "hm"}}]}',
        '{"choices": [{"delta": {"content": " yes"}, "finish_reason": "stop"}]}',
    )
    with scripted(events(*lines, end="")) as url:
        answer = BenchedServer(url, "m", timeout=5).ask(b"{}")
    assert (answer.text, answer.tokens, len(answer.pieces), answer.error) == (
        "hm yes",
        2,
        2,
        None,
    )


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "Refused" in str(BenchedServer(f"127.0.0.1:{port}", "m").ask(b"{}").error)


def test_requests_are_reproducible_and_unlike() -> None:
    some = Load(requests=6, sizes=((32, 32), (64, 32)), picture_share=0.5)
    server = BenchedServer("u", "m")
    bodies = [server.prepare(some.request(index)) for index in range(6)]
    assert bodies == [server.prepare(some.request(index)) for index in range(6)]
    assert len(set(bodies)) == 6
    assert sum(b"image_url" in one for one in bodies) == 3
    assert sum(b"data:image/jpeg;base64,/9j/" in one for one in bodies) == 3


def test_what_differs_from_alone_is_counted() -> None:
    answers = (
        TimedAnswer("a", (0.1, 0.2), 0.3, 5, 2),
        TimedAnswer("b", (0.1,), 0.2, 5, 1),
        TimedAnswer(error="x"),
    )
    alone = (TimedAnswer("a"), TimedAnswer("c"), TimedAnswer("d"))
    found = Report(Load(requests=3), "m at u", answers, alone, 2.0).figures()
    assert (found["checked"], found["equal_to_alone"], found["failed"]) == (2, 1, 1)
    assert found["requests_per_s"] == 1.0
    assert found["gap"]["max"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "flags",
    [
        [], ["--model", "m", "--sizes", "big"], ["--model", "m", "--url", "ftp://x"], ["--model", "m", "--concurrency", "0"],
        ["--model", "m", "--rate", "-1"], ["--model", "m", "--pictures", "2"],
    ],
    ids=str,
)  # fmt: skip
def test_usage_errors(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--url", "http://127.0.0.1:1", *flags]) == 2
    assert "vlm-batch:" in capsys.readouterr().err


def test_percentiles() -> None:
    assert spread([]) == {"p50": 0.0, "p95": 0.0, "p99": 0.0, "max": 0.0}
    assert spread([float(n) for n in range(1, 101)]) == {
        "p50": 50.5,
        "p95": 95.0,
        "p99": 99.0,
        "max": 100.0,
    }
