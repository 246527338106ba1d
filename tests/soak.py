"""A long day of a batcher in short: mixed requests for some time, and what it holds flat.

    python -m tests.soak --seconds 3600
    python -m tests.soak --seconds 600 --http
    python -m tests.soak --plot docs/images/soak.png --from batcher.json --from http.json

Requests with and without pictures, damaged pictures, cancelled ones, seeds, several answers and failing processors go
through the embedded checkpoint; over HTTP whole and streamed, from clients that leave, too. Every answer is compared with
the request's answer alone.
"""

from __future__ import annotations

import argparse
import base64
import gc
import json
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.serving import Running, picture, serving, text, wait_until
from vlm_batch import Caches, Handle, Result, SamplingParams, VLMBatcher, assets

PICTURES = Path(__file__).parent.parent / "fixtures" / "images"
#: In flight at a time.
AHEAD = 24
#: Growth from the first third to the last that is none: of bytes of the process, and of MLX's.
RSS_SLACK, MLX_SLACK = 48 << 20, 8 << 20
# full within seconds, so that what comes later shows growth and not filling
CACHE_BYTES = 16 << 20
#: Seconds for an answer: more than a machine that other work is measured on lets this process stand still.
PATIENCE = 3600.0


class Broken(Exception):
    """Raised by a request's own processor."""


@dataclass(frozen=True)
class Sample:
    """What the process held at a moment."""

    seconds: float
    requests: int
    rss: int
    mlx_active: int
    mlx_cache: int
    arrays: int
    threads: int
    files: int


def sample(begin: float, requests: int) -> Sample:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    arrays = sum(type(thing) is mx.array for thing in gc.get_objects())
    return Sample(
        time.monotonic() - begin,
        requests,
        pages * os.sysconf("SC_PAGE_SIZE"),
        mx.get_active_memory(),
        mx.get_cache_memory(),
        arrays,
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
    )


def broken(tokens: mx.array, logits: mx.array) -> mx.array:
    raise Broken("of the soak")


def asked(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A request of a kind, by the name under which its answer alone is known (empty: there is none)."""
    number, chance = draw.randrange(1, 10), draw.random()
    if chance < 0.35:
        return f"count {number}", {"prompt": f"count to {number}"}
    if chance < 0.7:
        name = draw.choice(("red_circle", "blue_square", "digits_728", "yellow_cross"))
        return f"picture {name}", {
            "images": PICTURES / f"{name}.png",
            "prompt": "describe the picture",
        }
    if chance < 0.8:
        params = SamplingParams(temperature=0.9, seed=number, max_tokens=20)
        return f"drawn {number}", {
            "prompt": "describe the picture",
            "images": PICTURES / "red_circle.png",
            "params": params,
        }
    if chance < 0.85:
        return f"several {number}", {
            "prompt": f"count to {number}",
            "params": SamplingParams(n=2),
        }
    if chance < 0.9:
        return "", {"images": draw.randbytes(400), "prompt": "describe the picture"}
    if chance < 0.95:
        return "", {
            "prompt": f"count to {number}",
            "params": SamplingParams(logits_processors=[broken]),
        }
    return f"cancelled {number}", {"prompt": f"count to {number}"}


def answer(result: Result) -> tuple[Any, ...]:
    return (result.text, result.token_ids, tuple(one.text for one in result.others))


def soak(
    seconds: float,
    seed: int = 0,
    every: float = 5.0,
    keep: Callable[[list[Sample]], None] = lambda samples: None,
) -> tuple[list[Sample], Counter[str], list[str]]:
    """Samples, how requests ended, and what was wrong. ``keep`` is shown the samples as they grow."""
    draw = random.Random(seed)
    ends = Counter[str]()
    wrong = list[str]()
    samples = list[Sample]()
    with VLMBatcher(assets.default_checkpoint(), caches=Caches(CACHE_BYTES)) as batcher:
        alone: dict[str, tuple[Any, ...]] = {}
        trial = random.Random(1)
        for _ in range(600):  # before anything else is there
            name, request = asked(trial)
            if name and name not in alone:
                alone[name] = answer(batcher.submit(**request).result(timeout=60))
        begin, flying, count = time.monotonic(), deque[tuple[str, Handle]](), 0
        while time.monotonic() < begin + seconds or flying:
            while len(flying) < AHEAD and time.monotonic() < begin + seconds:
                name, request = asked(draw)
                handle = batcher.submit(**request)
                if name.startswith("cancelled"):
                    handle.cancel()
                flying.append((name, handle))
                count += 1
            name, handle = flying.popleft()
            result = handle.result(timeout=PATIENCE)
            ends[result.finish_reason] += 1
            expected = {
                "error": not name,
                "cancelled": name.startswith("cancelled"),
            }.get(result.finish_reason, bool(name) and answer(result) == alone[name])
            if not expected:
                wrong.append(f"{name}: {result}")
            if time.monotonic() - begin >= every * len(samples):
                samples.append(sample(begin, count))
                keep(samples)
        stats = batcher.stats()
        if sum(ends.values()) != count or stats.decoding or stats.queued:
            wrong.append(f"{count} were asked and {sum(ends.values())} ended: {stats}")
    return samples, ends, wrong


# Over HTTP --------------------------------------------------------------------------------------------------------------

#: Clients at a time.
CLIENTS = 12


def posted(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A request's body, by the name under which its answer alone is known (empty: it is to be refused)."""
    number, chance = draw.randrange(1, 10), draw.random()
    fields: dict[str, Any] = {"max_tokens": 24, "temperature": 0}
    content: Any = f"count to {number}"
    name = f"count {number}"
    if chance < 0.4:
        shown = draw.choice(("red_circle", "blue_square", "digits_728", "yellow_cross"))
        content = [picture(f"{shown}.png"), text("describe the picture")]
        name = f"picture {shown}"
    elif chance < 0.5:
        fields |= {"temperature": 0.9, "seed": number}
        name = f"drawn {number}"
    elif chance < 0.6:
        fields |= {"n": 2}
        name = f"several {number}"
    elif chance < 0.7:
        damaged = base64.b64encode(draw.randbytes(400)).decode()
        content = [
            {
                "type": "image_url",
                "image_url": {"url": f"data:image/png;base64,{damaged}"},
            },
            text("describe it"),
        ]
        name = ""
    return name, {"messages": [{"role": "user", "content": content}], **fields}


def answered(server: Running, body: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """(status, texts by choice) of a request, streamed or whole."""
    reply = server.ask("POST", "/v1/chat/completions", body, timeout=PATIENCE)
    if reply.status != 200:
        return reply.status, ()
    if not body.get("stream"):
        return 200, tuple(
            choice["message"]["content"] for choice in reply.json["choices"]
        )
    texts: dict[int, str] = {}
    events = [
        line[6:]
        for line in reply.body.decode().splitlines()
        if line.startswith("data: ")
    ]
    assert events[-1] == "[DONE]", events[-1]
    for event in map(json.loads, events[:-1]):
        if "error" in event:
            return int(event["error"].get("code") or 400), ()
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + (
                choice["delta"].get("content") or ""
            )
    return 200, tuple(texts[index] for index in sorted(texts))


def leave(server: Running, body: dict[str, Any], after: int) -> None:
    """Ask, read some lines of the stream, and go."""
    connection = server.connect(PATIENCE)
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body | {"stream": True}),
            {"Content-Type": "application/json"},
        )
        if after:
            response = connection.getresponse()
            for _ in range(after):
                response.readline()
    finally:
        connection.close()


class Client:
    """One of many clients: asks, compares and leaves until it is told to stop."""

    def __init__(
        self, server: Running, alone: dict[str, tuple[str, ...]], seed: int
    ) -> None:
        self._server, self._alone, self._draw = server, alone, random.Random(seed)
        self.ends, self.wrong = Counter[str](), list[str]()

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            try:
                self._ask()
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")

    def _ask(self) -> None:
        name, body = posted(self._draw)
        if self._draw.random() < 0.15:
            leave(self._server, body, self._draw.randrange(6))
            self.ends["left"] += 1
            return
        status, texts = answered(
            self._server, body | {"stream": self._draw.random() < 0.5}
        )
        self.ends["answered" if status == 200 else "refused"] += 1
        if (
            (status == 200) is not bool(name)
            or (name and texts != self._alone[name])
            or status >= 500
        ):
            self.wrong.append(
                f"{name}: {status} {texts}, and alone {self._alone.get(name)}"
            )


def soak_http(
    seconds: float,
    seed: int = 0,
    every: float = 5.0,
    keep: Callable[[list[Sample]], None] = lambda samples: None,
) -> tuple[list[Sample], Counter[str], list[str]]:
    """``soak`` of a server, by clients in threads of this process."""
    samples = list[Sample]()
    alone = dict[str, tuple[str, ...]]()
    trial = random.Random(1)
    with serving(
        lambda: VLMBatcher(
            assets.default_checkpoint(), max_rows=8, caches=Caches(CACHE_BYTES)
        )
    ) as server:
        for _ in range(600):  # before anybody else is there
            name, body = posted(trial)
            if name and name not in alone:
                alone[name] = answered(server, body)[1]
        begin = time.monotonic()
        clients = [
            Client(server, alone, 1000 * seed + number) for number in range(CLIENTS)
        ]
        threads = [
            threading.Thread(
                target=client.run, args=(lambda: time.monotonic() > begin + seconds,)
            )
            for client in clients
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if time.monotonic() - begin >= every * len(samples) and all(
                thread.is_alive() for thread in threads
            ):
                samples.append(
                    sample(begin, sum(client.ends.total() for client in clients))
                )
                keep(samples)
            time.sleep(0.05)
        wait_until(lambda: _is_idle(server), "the last to end", PATIENCE)
    wrong = [said for client in clients for said in client.wrong]
    return samples, sum((client.ends for client in clients), Counter[str]()), wrong


def _is_idle(server: Running) -> bool:
    stats = server.server.service.stats()
    return stats is not None and not (
        stats.decoding or stats.queued or stats.waiting or stats.prefilling
    )


# Figures ----------------------------------------------------------------------------------------------------------------


def growth(samples: list[Sample]) -> list[str]:
    """What was not flat: the last third beside the second.

    By the most of bytes and arrays, and by the least of threads and files: pictures are open while they are read, so their most
    goes up and down, and what is lost stays open.
    """
    third = len(samples) // 3
    found = []
    for name, slack, choose in (
        ("rss", RSS_SLACK, max),
        ("mlx_active", MLX_SLACK, max),
        ("mlx_cache", 64 << 20, max),
        ("arrays", 200, max),
        ("threads", 2, min),
        ("files", 2, min),
    ):
        before, after = (
            choose(getattr(one, name) for one in part)
            for part in (samples[third:-third], samples[-third:])
        )
        if after > before + slack:
            found.append(f"{name} grew from {before:,} to {after:,}")
    return found


def plot(runs: list[list[dict[str, Any]]], names: list[str], path: Path) -> None:
    """What a process held over time: a line for each run. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = (
        ("rss", "resident memory, MB", 1e6),
        ("mlx_active", "MLX active, MB", 1e6),
        ("mlx_cache", "MLX's cache, MB", 1e6),
        ("arrays", "live arrays", 1),
        ("threads", "threads", 1),
        ("files", "open files", 1),
    )
    figure, axes = pyplot.subplots(2, 3, figsize=(11, 5.2), sharex=True)
    for axis, (key, label, unit) in zip(axes.flat, parts, strict=True):
        for name, samples in zip(names, runs, strict=True):
            axis.plot(
                [one["seconds"] / 60 for one in samples],
                [one[key] / unit for one in samples],
                label=name,
                lw=1.2,
            )
        axis.set_title(label, fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("minutes")
    axes[0][0].legend(loc="lower right", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--http", action="store_true", help="a server, and clients that leave"
    )
    parser.add_argument("--json", type=Path, help="where the samples go")
    parser.add_argument(
        "--plot", type=Path, help="draw samples of earlier runs, and do nothing else"
    )
    parser.add_argument(
        "--from",
        dest="sources",
        type=Path,
        action="append",
        default=[],
        help="samples to draw",
    )
    options = parser.parse_args()
    if options.plot is not None:
        runs = [json.loads(source.read_text()) for source in options.sources]
        plot(runs, [source.stem for source in options.sources], options.plot)
        return

    def keep(samples: list[Sample]) -> None:
        if options.json is not None:
            options.json.write_text(
                json.dumps([asdict(one) for one in samples], indent=1)
            )

    run = soak_http if options.http else soak
    samples, ends, wrong = run(
        options.seconds, options.seed, max(1.0, options.seconds / 120), keep
    )
    for one in (samples[0], samples[len(samples) // 2], samples[-1]):
        print(one)
    print(
        dict(ends),
        f"{sum(ends.values()):,} requests;",
        *(wrong[:5] or ["every answer is its own"]),
    )
    print(*(growth(samples) or ["flat"]), sep="\n")


if __name__ == "__main__":
    main()
