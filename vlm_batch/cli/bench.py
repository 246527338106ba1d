"""``vlm-batch bench``: a chat load on one's own model and machine, and where its time goes.

Requests arrive by chance (Poisson), some with a picture, with prompts and answers of all lengths: what a chat server sees.
Everything goes through ``VLMBatcher``, as an application's requests do: pictures are processed and text is decoded.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TextIO

import numpy as np
from PIL import Image
from rich import box
from rich.table import Column, Table

from vlm_batch.cli.console import open_console
from vlm_batch.handle import Handle
from vlm_batch.types import Request, Result, SamplingParams

#: Sides of the pictures in pixels; a photo is scaled to such sizes for most models.
PICTURE_SIDES = (224, 336, 448, 560)
WORDS = (
    "the",
    "picture",
    "shows",
    "a",
    "small",
    "red",
    "boat",
    "near",
    "green",
    "hills",
    "two",
    "people",
    "look",
    "at",
    "old",
)


class Batcher(Protocol):
    """The part of a batcher that a benchmark calls."""

    def submit_request(self, request: Request) -> Handle: ...


@dataclass(frozen=True, kw_only=True)
class Load:
    """A load of requests. ``prompt_words`` and ``answer_tokens`` are (least, most), drawn log-uniformly.

    ``rate`` is arrivals a second; None measures one request alone and takes twice what it could serve, 0 is all at once.
    """

    requests: int = 32
    rate: float | None = None
    picture_share: float = 0.5
    prompt_words: tuple[int, int] = (24, 900)
    answer_tokens: tuple[int, int] = (8, 128)
    seed: int = 4


@dataclass(frozen=True)
class Report:
    """The outcome of a load: a result for each request, the times at which its pieces of text came, and the seconds in all."""

    results: tuple[Result, ...]
    pieces: tuple[tuple[float, ...], ...]
    rate: float
    seconds: float

    def figures(self) -> dict[str, Any]:
        """Numbers for a table or a JSON line; times in seconds."""
        done = [result for result in self.results if result.ok]
        tokens = sum(result.usage.completion_tokens for result in done)
        stages = ("queue", "encode", "prefill", "decode")
        spent = {stage: sum(getattr(result.timings, stage) for result in done) for stage in stages}
        whole = sum(spent.values())
        gaps = [b - a for times in self.pieces for a, b in pairwise(times)]
        prompts = [result.usage.prompt_tokens for result in done]
        return {
            "requests": len(self.results),
            "failed": len(self.results) - len(done),
            "with_pictures": sum(bool(result.image_sizes) for result in done),
            "prompt_tokens": [min(prompts, default=0), max(prompts, default=0)],
            "arrivals_per_s": self.rate,
            "seconds": self.seconds,
            "requests_per_s": len(done) / self.seconds,
            "tokens_per_s": tokens / self.seconds,
            "ttft": _spread([result.timings.ttft for result in done]),
            "gap": _spread(gaps),
            "stages": {
                stage: {
                    "share": spent[stage] / whole if whole else 0.0,
                    **_spread([getattr(result.timings, stage) for result in done]),
                }
                for stage in stages
            },
        }


def make_requests(load: Load) -> list[Request]:
    """The requests of a load, the same for the same seed."""
    chance = random.Random(load.seed)
    return [_request(chance, load, index) for index in range(load.requests)]


def measure(batcher: Batcher, load: Load) -> Report:
    """Submit the load as time goes by and wait for its end. A first request, which is not counted, warms up."""
    requests = make_requests(load)
    warm = _request(random.Random(load.seed - 1), load, -1)
    batcher.submit_request(warm).result()
    rate = load.rate
    if rate is None:
        begin = time.perf_counter()
        middle = sorted(requests, key=lambda request: request.params.max_tokens)[len(requests) // 2]
        batcher.submit_request(
            Request(prompt=middle.prompt, images=middle.images, params=middle.params, request_id="alone")
        ).result()
        rate = 2 / (time.perf_counter() - begin)
    chance = random.Random(load.seed + 1)
    times: list[list[float]] = [[] for _ in requests]
    readers: list[threading.Thread] = []
    handles: list[Handle] = []
    start = due = time.perf_counter()
    for request, stamps in zip(requests, times, strict=True):
        time.sleep(max(0.0, due - time.perf_counter()))
        handle = batcher.submit_request(request)
        handles.append(handle)
        reader = threading.Thread(target=_read, args=(handle, stamps), daemon=True)
        reader.start()
        readers.append(reader)
        due += chance.expovariate(rate) if rate else 0.0
    results = tuple(handle.result() for handle in handles)
    seconds = time.perf_counter() - start
    for reader in readers:
        reader.join()
    return Report(results, tuple(tuple(stamps) for stamps in times), rate, seconds)


def show(report: Report, out: TextIO) -> None:
    """The figures as tables."""
    found = report.figures()
    console = open_console(out)
    low, high = found["prompt_tokens"]
    arrivals = f"{found['arrivals_per_s']:.2g} arrivals a second" if found["arrivals_per_s"] else "all at once"
    console.print(
        f"{found['requests']} requests, {found['with_pictures']} with a picture, prompts of {low}-{high} tokens, {arrivals}"
        + (f", {found['failed']} failed" if found["failed"] else "")
    )
    console.print(
        f"{found['seconds']:.2f} s, {found['requests_per_s']:.2f} requests/s, {found['tokens_per_s']:.1f} tokens/s"
    )
    headings = [Column(heading, justify="right") for heading in ("share", "p50 s", "p95 s", "max s")]
    table = Table("", *headings, box=box.SIMPLE_HEAD)
    rows = [(stage, f"{100 * entry['share']:.0f} %", entry) for stage, entry in found["stages"].items()]
    rows += [("submit to first token", "", found["ttft"]), ("between pieces of text", "", found["gap"])]
    for name, share, entry in rows:
        table.add_row(name, share, *(f"{entry[which]:.3f}" for which in ("p50", "p95", "max")))
    console.print(table)
    for error in sorted({result.error for result in report.results if result.error is not None}):
        console.print(f"failed: {error}", style="red", markup=False)


def _request(chance: random.Random, load: Load, index: int) -> Request:
    count = _between(chance, load.prompt_words)
    tokens = _between(chance, load.answer_tokens)
    has_picture = chance.random() < load.picture_share
    prompt = " ".join(chance.choice(WORDS) for _ in range(count))
    return Request(
        prompt=prompt,
        images=(_picture(chance),) if has_picture else (),
        params=SamplingParams(max_tokens=tokens, ignore_eos=True),
        request_id=f"bench-{index}",
    )


def _picture(chance: random.Random) -> Image.Image:
    """Noise of a random size: no two are alike, so that no cache answers for the encoder."""
    size = (chance.choice(PICTURE_SIDES), chance.choice(PICTURE_SIDES))
    noise = np.random.default_rng(chance.getrandbits(32)).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size)


def _between(chance: random.Random, limits: tuple[int, int]) -> int:
    low, high = limits
    return min(high, round(low * (high / low) ** chance.random()))


def _read(handle: Handle, stamps: list[float]) -> None:
    for _ in handle:
        stamps.append(time.perf_counter())


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and greatest; zeros if there are none."""
    known = sorted(value for value in values if value == value)
    if not known:
        return {"p50": 0.0, "p95": 0.0, "max": 0.0}
    rank = min(len(known) - 1, round(0.95 * (len(known) - 1)))
    return {"p50": statistics.median(known), "p95": known[rank], "max": known[-1]}
