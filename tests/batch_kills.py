"""Kills a server in the middle of a batch, again and again: python -m tests.batch_kills --kills 200

Every row must have one line in the output or the error file at the end, with the answer that it has without kills.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

PATH = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
START_SECONDS = 120.0
#: Every so many rows cannot be answered.
WRONG = 7


class Killed:
    """A server as a process of its own, on the same folder after each kill."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = found.getsockname()[1]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until it answers."""
        flags = ("--port", str(self.port), "--files", str(self._folder))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vlm_batch", "serve", "--no-warm-up", *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            assert self._process.poll() is None, "the server has ended"
            try:
                self.ask("/health")
                return
            except OSError:
                time.sleep(0.02)
        raise AssertionError("the server does not answer")

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def ask(self, path: str, body: bytes | None = None, kind: str = "") -> Any:
        url = f"http://127.0.0.1:{self.port}{path}"
        headers = {"Content-Type": kind} if kind else {}
        with urllib.request.urlopen(
            urllib.request.Request(url, body, headers), timeout=60
        ) as reply:
            return json.loads(reply.read())

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """Return the lines of a file of answers."""
        if file_id is None:
            return []
        url = f"http://127.0.0.1:{self.port}/v1/files/{file_id}/content"
        with urllib.request.urlopen(url, timeout=60) as reply:
            return [json.loads(line) for line in reply.read().splitlines()]

    def begin(self, rows: int) -> str:
        """Upload a file of requests, and begin its batch."""
        lines = "\n".join(_line(at) for at in range(rows)).encode()
        head = 'Content-Disposition: form-data; name="{}"{}\r\n\r\n'
        form = (
            b"--X\r\n"
            + head.format("purpose", "").encode()
            + b"batch\r\n--X\r\n"
            + head.format("file", '; filename="rows.jsonl"').encode()
            + lines
            + b"\r\n--X--\r\n"
        )
        file = self.ask("/v1/files", form, "multipart/form-data; boundary=X")
        asked = {
            "input_file_id": file["id"],
            "endpoint": PATH,
            "completion_window": "24h",
        }
        made = self.ask("/v1/batches", json.dumps(asked).encode(), "application/json")
        return str(made["id"])


def _line(at: int) -> str:
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"count to {at % 9 + 1}"}]
    }
    if at % WRONG == 0:
        chat["temperature"] = -1
    row = {"custom_id": f"row-{at}", "method": "POST", "url": PATH, "body": chat}
    return json.dumps(row)


def killed_batch(folder: Path, kills: int, rows: int, seed: int = 0) -> int:
    """Run batches with so many kills in their middle. Returns how many batches it took.

    Raises:
        AssertionError: A row was lost or doubled, or has another answer.
    """
    chance = random.Random(seed)
    server = Killed(folder)
    server.start()
    batch_id, batches = server.begin(rows), 1
    try:
        while kills:
            time.sleep(chance.uniform(0.0, 1.2))
            if server.ask(f"/v1/batches/{batch_id}")["status"] in ENDED:
                check(server, batch_id, rows)
                batch_id, batches = server.begin(rows), batches + 1
                continue
            server.kill()
            kills -= 1
            server.start()
        while server.ask(f"/v1/batches/{batch_id}")["status"] not in ENDED:
            time.sleep(0.1)
        check(server, batch_id, rows)
    finally:
        server.kill()
    return batches


def check(server: Killed, batch_id: str, rows: int) -> None:
    batch = server.ask(f"/v1/batches/{batch_id}")
    assert batch["status"] == "completed", batch
    answered = server.lines(batch["output_file_id"])
    failed = server.lines(batch["error_file_id"])
    names = Counter(line["custom_id"] for line in (*answered, *failed))
    assert names == Counter(f"row-{at}" for at in range(rows)), "lost or doubled"
    for line in answered:
        at = int(line["custom_id"].partition("-")[2])
        said = line["response"]["body"]["choices"][0]["message"]["content"]
        assert said == " ".join(map(str, range(1, at % 9 + 2))), line
    assert all(line["response"]["status_code"] == 400 for line in failed)
    wrong = sum(at % WRONG == 0 for at in range(rows))
    counts = {"total": rows, "completed": rows - wrong, "failed": wrong}
    assert batch["request_counts"] == counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        batches = killed_batch(Path(folder), args.kills, args.rows, args.seed)
    seconds = time.monotonic() - begin
    print(f"{args.kills} kills, {batches} batches of {args.rows}: {seconds:.0f} s")


if __name__ == "__main__":
    main()
