"""Tries an installed vlm-batch, with the standard library alone: ``ENVIRONMENT/bin/python release/smoke.py VERSION``.

Answers, an output, a report, a server that answers a chat about a picture, and a page. Run it outside the repository, so that
the installed package is what is tried.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

START_SECONDS = 120


def main(version: str) -> None:
    import vlm_batch
    from vlm_batch.assets import sample_images

    place = Path(vlm_batch.__file__).resolve()
    check(place.is_relative_to(Path(sys.prefix).resolve()), f"{place} is not installed")
    check(vlm_batch.__version__ == version, f"it is {vlm_batch.__version__}")
    pictures = {path.stem: path for path in sample_images()}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        check(command("--version") == f"vlm-batch {version}\n", "--version")
        check("red circle" in command("demo"), "demo")
        names = [str(pictures[name]) for name in ("red_circle", "receipt")]
        command("run", *names, "--out", "a.jsonl", "--max-tokens", "40")
        texts = [
            json.loads(line)["text"]
            for line in Path("a.jsonl").read_text().splitlines()
        ]
        check("a red circle" in texts, f"run answered {texts}")
        command("report", "a.jsonl")
        check("a red circle" in Path("a.html").read_text(), "report")
        check_server(pictures["red_circle"])
    print(
        f"vlm-batch {version} works with Python {sys.version.split()[0]} in {sys.prefix}"
    )


def command(*words: str) -> str:
    """Return what a command prints."""
    program = str(Path(sys.prefix) / "bin/vlm-batch")
    run = subprocess.run(
        [program, *words], capture_output=True, text=True, timeout=600, check=False
    )
    check(run.returncode == 0, f"vlm-batch {' '.join(words)}: {run.stderr}")
    return run.stdout


def check_server(picture: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(sys.prefix) / "bin/vlm-batch")
    words = [program, "serve", "--port", str(port), "--no-warm-up"]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{url}/ready", server)
        coded = base64.b64encode(picture.read_bytes()).decode()
        parts = [
            {
                "type": "image_url",
                "image_url": {"url": f"data:image/png;base64,{coded}"},
            },
            {"type": "text", "text": "describe the picture"},
        ]
        chat = {"messages": [{"role": "user", "content": parts}]}
        answer = json.loads(fetched(f"{url}/v1/chat/completions", chat))
        text = answer["choices"][0]["message"]["content"]
        check(text == "a red circle", f"the server answered {text!r}")
        check(b"<html" in fetched(f"{url}/"), "the page")
    finally:
        server.terminate()
    status = server.wait(60)
    check(status in (0, -signal.SIGTERM), f"the server ended with {status}")


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        check(server.poll() is None, "the server ended")
        check(time.monotonic() < until, "the server did not begin")
        try:
            fetched(url)
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)


def fetched(url: str, body: Any = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        found: bytes = response.read()
    return found


def check(holds: bool, said: str) -> None:
    if not holds:
        sys.exit(f"smoke: {said}")


if __name__ == "__main__":
    main(sys.argv[1])
