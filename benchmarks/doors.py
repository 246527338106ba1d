"""The doors of ``vlm-batch serve`` beside each other, and a batch beside a job.

    python -m benchmarks.doors chats --rounds 5
    python -m benchmarks.doors batch --rows 300 --rounds 5

``chats``: the same questions through chat completions, Responses and Messages, 48 at once, whole and streamed; each round
asks at every door in turn, each time another first. ``batch``: the same rows by ``/v1/batches`` and by ``vlm-batch run``,
from the first row to the last answer, in turn. Each ratio is of one round, to chat completions or to the job; medians with
the least and the largest. Wants a machine on which nothing else runs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from openai import OpenAI

from benchmarks.servers import running
from vlm_batch.assets import default_checkpoint

AT_ONCE = 48
TOKENS = 32
BASE: Final = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def turn(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"count to {number % 20}, for the {number}th"}


#: Paths -> the body of a question. All have the same prompt and the same number of tokens.
DOORS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "/v1/chat/completions": lambda n: {"messages": [turn(n)], "max_tokens": TOKENS},
    "/v1/responses": lambda n: {"input": [turn(n)], "max_output_tokens": TOKENS},
    "/v1/messages": lambda n: {"messages": [turn(n)], "max_tokens": TOKENS},
}


async def ask(address: tuple[str, int], path: str, body: Mapping[str, Any]) -> int:
    """Ask on a connection of its own, and read to its end. Returns the answer's bytes. Raises RuntimeError."""
    reader, writer = await asyncio.open_connection(*address)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address[0]}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    answer = await reader.read(-1)
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"{path}: {answer[:500]!r}")
    return len(answer)


async def load(
    address: tuple[str, int], path: str, numbers: Sequence[int], *, streams: bool
) -> float:
    """Ask all at once; return the seconds."""
    bodies = []
    for number in numbers:
        body = {**DOORS[path](number), "ignore_eos": True, "stream": streams}
        bodies.append(body)
    began = time.perf_counter()
    await asyncio.gather(*(ask(address, path, body) for body in bodies))
    return time.perf_counter() - began


def one_round(
    address: tuple[str, int], number: int, at_once: int, *, streams: bool
) -> dict[str, float]:
    """Return each door's seconds. Who is first changes from round to round, and nobody has kept the prompts."""
    begin = number % len(DOORS)
    order = [*list(DOORS)[begin:], *list(DOORS)[:begin]]
    seconds = {}
    for place, path in enumerate(order):
        first = ((2 * number + streams) * len(DOORS) + place) * 1000
        numbers = range(first, first + at_once)
        seconds[path] = asyncio.run(load(address, path, numbers, streams=streams))
    return seconds


def chats(options: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Measure each door, and return its ratios to chat completions."""
    python = [sys.executable, "-m", "vlm_batch", "serve"]
    ratios: dict[str, list[float]] = {}
    with running([*python, "--model", options.model], log) as url:
        split = urlsplit(url)
        address = (str(split.hostname), int(split.port or 0))
        for number in range(options.rounds + 1):
            for streams in (False, True):
                seconds = one_round(address, number, options.at_once, streams=streams)
                if not number:  # the first warms up
                    continue
                kind = "streamed" if streams else "whole"
                print(kind, {path: round(said, 3) for path, said in seconds.items()})
                for path in list(DOORS)[1:]:
                    found = ratios.setdefault(f"{path}, {kind}", [])
                    found.append(seconds[path] / seconds[BASE])
    return ratios


def rows(count: int) -> list[dict[str, Any]]:
    found = []
    for number in range(count):
        body = {**DOORS[BASE](number), "ignore_eos": True}
        row = {"custom_id": f"row-{number}", "method": "POST", "url": BASE}
        found.append({**row, "body": body})
    return found


def by_job(model: str, path: Path, out: Path) -> float:
    """Answer rows by ``vlm-batch run``; return its own seconds, from the first row to the last."""
    command = [sys.executable, "-m", "vlm_batch", "run", str(path), "--model", model]
    ran = subprocess.run(
        [*command, "--out", str(out), "--overwrite"],
        check=True,
        capture_output=True,
        text=True,
    )
    said = re.search(r"in ([0-9.]+) s", ran.stderr + ran.stdout)
    if said is None:
        raise RuntimeError(f"vlm-batch run did not say its time: {ran.stderr[-500:]}")
    return float(said[1])


def by_batch(url: str, path: Path) -> float:
    """Answer rows by a batch; return the seconds from its begin until it has ended."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    file = client.files.create(file=path, purpose="batch")
    began = time.perf_counter()
    batch = client.batches.create(
        input_file_id=file.id, endpoint=BASE, completion_window="24h"
    )
    while batch.status not in ENDED:
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    seconds = time.perf_counter() - began
    counts = batch.request_counts
    if counts is None or counts.completed != counts.total:
        raise RuntimeError(f"a batch ended as {batch.status}, with {counts}")
    return seconds


def batch(options: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Measure batches and jobs in turn, and return the ratios."""
    ratios = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        path = folder / "rows.jsonl"
        lines = [json.dumps(row) for row in rows(options.rows)]
        path.write_text("\n".join(lines), encoding="utf-8")
        flags = ["--model", options.model, "--files", str(folder / "files")]
        with running([sys.executable, "-m", "vlm_batch", "serve", *flags], log) as url:
            by_batch(url, path)  # warms up
            for _ in range(options.rounds):
                job = by_job(options.model, path, folder / "out.jsonl")
                ours = by_batch(url, path)
                print(f"a job {job:.2f} s, a batch {ours:.2f} s")
                ratios.append(ours / job)
    return {f"a batch of {options.rows} rows to a job": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("chats", "batch"))
    parser.add_argument("--model", default=str(default_checkpoint()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--rows", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        measure = chats if options.what == "chats" else batch
        found = measure(options, Path(made) / "server.log")
    shown = {}
    for name, ratios in found.items():
        median = statistics.median(ratios)
        shown[name] = [round(one, 3) for one in (median, min(ratios), max(ratios))]
        print(f"{name}: {median:.3f} ({min(ratios):.3f}-{max(ratios):.3f})")
    print(json.dumps(shown))


if __name__ == "__main__":
    main()
