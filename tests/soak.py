"""A long day of a batcher in short: mixed requests for some time, and what it holds flat.

    python -m tests.soak --seconds 3600

Requests with and without pictures, damaged pictures, cancelled ones, seeds, several answers, conversations and failing
processors go through the embedded checkpoint. Every answer is compared with the request's answer alone.
"""

from __future__ import annotations

import argparse
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

from vlm_batch import Handle, Result, SamplingParams, VLMBatcher, assets

PICTURES = Path(__file__).parent.parent / "fixtures" / "images"
#: In flight at a time.
AHEAD = 24
#: Growth from the first third to the last that is none: of bytes of the process, and of MLX's.
RSS_SLACK, MLX_SLACK = 48 << 20, 8 << 20
CACHE_BYTES = 16 << 20  # full within seconds, so that what comes later shows growth and not filling
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
        return f"picture {name}", {"images": PICTURES / f"{name}.png", "prompt": "describe the picture"}
    if chance < 0.8:
        params = SamplingParams(temperature=0.9, seed=number, max_tokens=20)
        return f"drawn {number}", {
            "prompt": "describe the picture",
            "images": PICTURES / "red_circle.png",
            "params": params,
        }
    if chance < 0.85:
        return f"several {number}", {"prompt": f"count to {number}", "params": SamplingParams(n=2)}
    if chance < 0.9:
        return "", {"images": draw.randbytes(400), "prompt": "describe the picture"}
    if chance < 0.95:
        return "", {"prompt": f"count to {number}", "params": SamplingParams(logits_processors=[broken])}
    return f"cancelled {number}", {"prompt": f"count to {number}"}


def answer(result: Result) -> tuple[Any, ...]:
    return (result.text, result.token_ids, tuple(one.text for one in result.others))


def soak(
    seconds: float, seed: int = 0, every: float = 5.0, keep: Callable[[list[Sample]], None] = lambda samples: None
) -> tuple[list[Sample], Counter[str], list[str]]:
    """Samples, how requests ended, and what was wrong. ``keep`` is shown the samples as they grow."""
    draw, ends, wrong, samples = random.Random(seed), Counter[str](), list[str](), list[Sample]()
    with VLMBatcher(assets.default_checkpoint(), cache_bytes=CACHE_BYTES) as batcher:
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
            expected = {"error": not name, "cancelled": name.startswith("cancelled")}.get(
                result.finish_reason, bool(name) and answer(result) == alone[name]
            )
            if not expected:
                wrong.append(f"{name}: {result}")
            if time.monotonic() - begin >= every * len(samples):
                samples.append(sample(begin, count))
                keep(samples)
        stats = batcher.stats()
        if sum(ends.values()) != count or stats.decoding or stats.queued:
            wrong.append(f"{count} were asked and {sum(ends.values())} ended: {stats}")
    return samples, ends, wrong


def growth(samples: list[Sample]) -> list[str]:
    """What was not flat: the most of the last third beside the most of the second."""
    third = len(samples) // 3
    found = []
    for name, slack in (
        ("rss", RSS_SLACK),
        ("mlx_active", MLX_SLACK),
        ("mlx_cache", 64 << 20),
        ("arrays", 200),
        ("threads", 2),
        ("files", 2),
    ):
        before, after = (max(getattr(one, name) for one in part) for part in (samples[third:-third], samples[-third:]))
        if after > before + slack:
            found.append(f"{name} grew from {before:,} to {after:,}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where the samples go")
    options = parser.parse_args()

    def keep(samples: list[Sample]) -> None:
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(one) for one in samples], indent=1))

    samples, ends, wrong = soak(options.seconds, options.seed, max(1.0, options.seconds / 120), keep)
    for one in (samples[0], samples[len(samples) // 2], samples[-1]):
        print(one)
    print(dict(ends), f"{sum(ends.values()):,} requests;", *(wrong[:5] or ["every answer is its own"]))
    print(*(growth(samples) or ["flat"]), sep="\n")


if __name__ == "__main__":
    main()
