"""``vlm-batch bench --url``: a load for any server that speaks OpenAI's chat completions, and how it was answered.

Requests arrive by chance (Poisson), or so many are always under way (closed loop). Every answer is streamed; some of the
requests are asked again alone, and their answers under load are compared with those. The standard library's client is
used, a thread for each request that is under way: the load costs the machine little beside the server.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

import numpy as np
from PIL import Image
from rich import box
from rich.table import Column, Table

from vlm_batch.cli.console import open_console

#: The words of prompts: about a token each for most tokenizers.
WORDS = (
    "the", "picture", "shows", "a", "small", "red", "boat", "near", "green", "hills", "two", "people", "look", "at", "old",
)  # fmt: skip
#: Most requests that are under way at a time when they arrive by chance.
MAX_OPEN = 1024
API_KEY = "OPENAI_API_KEY"


@dataclass(frozen=True, kw_only=True)
class Load:
    """A load: the requests, and their rate.

    ``rate`` is arrivals a second; without it, ``concurrency`` requests are always under way. ``sizes`` are the
    pictures' (width, height), taken in turn; ``picture_share`` of the requests have one. A prompt has about
    ``prompt_tokens`` words, an answer at most ``answer_tokens`` tokens, and exactly so many with ``ignore_eos``, which not
    every server knows. The first ``check`` requests are asked alone, too.
    """

    requests: int = 64
    concurrency: int = 8
    rate: float | None = None
    sizes: tuple[tuple[int, int], ...] = ((384, 384),)
    picture_share: float = 1.0
    prompt_tokens: int = 64
    answer_tokens: int = 64
    ignore_eos: bool = False
    check: int = 8
    seed: int = 4

    def __post_init__(self) -> None:
        if self.requests < 1 or self.concurrency < 1 or self.prompt_tokens < 1 or self.answer_tokens < 1:
            raise ValueError("requests, concurrency, prompt and answer tokens must be at least 1")
        if self.rate is not None and not (self.rate > 0 and math.isfinite(self.rate)):
            raise ValueError(f"the rate is {self.rate}; it must be a finite number above 0")
        if not 0 <= self.picture_share <= 1:
            raise ValueError(f"the share of pictures is {self.picture_share}; it must be in 0..1")


#: Named loads. "384" is the one load that has a published figure on Apple hardware.
PRESETS: dict[str, Load] = {
    "384": Load(
        requests=64, concurrency=8, sizes=((384, 384),), prompt_tokens=256, answer_tokens=128, ignore_eos=False
    ),
    "documents": Load(
        requests=32, concurrency=8, sizes=((1240, 1754), (850, 1100)), prompt_tokens=48, answer_tokens=256
    ),
    "text": Load(requests=64, concurrency=16, picture_share=0.0, prompt_tokens=256, answer_tokens=128),
}


@dataclass(frozen=True)
class Target:
    """A server and the model that is asked there."""

    url: str
    model: str
    key: str | None = None
    timeout: float = 600.0

    def connect(self) -> tuple[HTTPConnection, str]:
        """A connection, and the path of chat completions. Raises ValueError for a URL that is none."""
        parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url} is no http(s) URL")
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        base = parts.path.rstrip("/")
        path = f"{base if base.endswith('/v1') else f'{base}/v1'}/chat/completions"
        return kind(parts.hostname, parts.port, timeout=self.timeout), path


@dataclass(frozen=True)
class Answer:
    """One streamed answer: its text, when its pieces came (seconds after it was asked), its tokens; or what went wrong."""

    text: str = ""
    pieces: tuple[float, ...] = ()
    seconds: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Report:
    """The outcome of a load; ``alone`` are the answers of the first requests, asked one after another afterwards."""

    load: Load
    target: Target
    answers: tuple[Answer, ...]
    alone: tuple[Answer, ...]
    seconds: float

    def figures(self) -> dict[str, Any]:
        """Numbers for a table or a JSON line; times in seconds."""
        done = [answer for answer in self.answers if answer.error is None]
        checked = [
            (first, second)
            for first, second in zip(self.alone, self.answers, strict=False)
            if first.error is None and second.error is None
        ]
        tokens = sum(answer.tokens for answer in done)
        return {
            "url": self.target.url,
            "model": self.target.model,
            "requests": len(self.answers),
            "failed": len(self.answers) - len(done),
            "concurrency": None if self.load.rate else self.load.concurrency,
            "arrivals_per_s": self.load.rate,
            "pictures": sum(_has_picture(self.load, index) for index in range(self.load.requests)),
            "prompt_tokens": statistics.mean([answer.prompt_tokens for answer in done]) if done else 0,
            "answer_tokens": tokens / len(done) if done else 0,
            "seconds": self.seconds,
            "requests_per_s": len(done) / self.seconds,
            "tokens_per_s": tokens / self.seconds,
            "ttft": spread([answer.pieces[0] for answer in done if answer.pieces]),
            "gap": spread([b - a for answer in done for a, b in pairwise(answer.pieces)]),
            "whole": spread([answer.seconds for answer in done]),
            "checked": len(checked),
            "equal_to_alone": sum(first.text == second.text for first, second in checked),
        }


def measure(target: Target, load: Load) -> Report:
    """Put the load on, wait for its end, then ask some of its requests alone. A request that is not counted warms up.

    Alone comes after: what a server keeps of requests that it has seen would make the load lighter.
    """
    bodies = [body(load, target.model, index) for index in range(load.requests)]
    ask(target, body(replace(load, answer_tokens=4), target.model, load.requests))
    begin = time.perf_counter()
    answers = _by_chance(target, load, bodies) if load.rate else _closed_loop(target, load, bodies)
    seconds = time.perf_counter() - begin
    alone = tuple(ask(target, one) for one in bodies[: load.check])
    return Report(load, target, answers, alone, seconds)


def body(load: Load, model: str, index: int) -> bytes:
    """A request's body; the same for the same load and index, and unlike every other's."""
    chance = random.Random(f"{load.seed}/{index}")
    words = " ".join(chance.choice(WORDS) for _ in range(load.prompt_tokens))
    content: list[dict[str, Any]] = [{"type": "text", "text": words}]
    if _has_picture(load, index):
        content.insert(
            0, {"type": "image_url", "image_url": {"url": picture(load.sizes[index % len(load.sizes)], chance)}}
        )
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": load.answer_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.ignore_eos:
        fields["ignore_eos"] = True
    return json.dumps(fields).encode()


def picture(size: tuple[int, int], chance: random.Random) -> str:
    """Coarse noise of that size as a data URI: no two are alike, so that no cache answers for the encoder."""
    noise = np.random.default_rng(chance.getrandbits(32)).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    held = io.BytesIO()
    Image.fromarray(noise).resize(size).save(held, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(held.getvalue()).decode()


def ask(target: Target, data: bytes) -> Answer:
    """One streamed answer. What goes wrong is part of it."""
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if target.key:
        headers["Authorization"] = f"Bearer {target.key}"
    connection, path = target.connect()
    begin = time.perf_counter()
    try:
        connection.request("POST", path, data, headers)
        response = connection.getresponse()
        if response.status != 200:
            return Answer(error=f"HTTP {response.status}: {response.read(300).decode('utf-8', 'replace')}")
        return _read(response, begin)
    except (OSError, HTTPException, ValueError) as error:
        return Answer(error=f"{type(error).__name__}: {error}", seconds=time.perf_counter() - begin)
    finally:
        connection.close()


def _read(response: Any, begin: float) -> Answer:
    """A stream of events to its end. A piece is an event that adds text, be it answer or reasoning."""
    said: list[str] = []
    times: list[float] = []
    usage: dict[str, Any] = {}
    has_ended = False
    while line := response.readline():
        now = time.perf_counter() - begin
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            has_ended = True
            break
        event = json.loads(data)
        if "error" in event:
            return Answer(error=str(event["error"])[:300], seconds=now)
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            text = (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")
            has_ended = has_ended or bool(choice.get("finish_reason"))
            if text:
                said.append(text)
                times.append(now)
    if not has_ended:
        return Answer(error="the stream broke off", seconds=time.perf_counter() - begin)
    tokens = usage.get("completion_tokens", len(times))
    return Answer(
        "".join(said), tuple(times), time.perf_counter() - begin, int(usage.get("prompt_tokens", 0)), int(tokens)
    )


def _closed_loop(target: Target, load: Load, bodies: Sequence[bytes]) -> tuple[Answer, ...]:
    with ThreadPoolExecutor(min(load.concurrency, len(bodies))) as pool:
        return tuple(pool.map(lambda one: ask(target, one), bodies))


def _by_chance(target: Target, load: Load, bodies: Sequence[bytes]) -> tuple[Answer, ...]:
    """Arrivals do not wait for answers."""
    assert load.rate is not None
    chance = random.Random(load.seed)
    due = time.perf_counter()
    with ThreadPoolExecutor(min(MAX_OPEN, len(bodies))) as pool:
        asked = []
        for one in bodies:
            time.sleep(max(0.0, due - time.perf_counter()))
            asked.append(pool.submit(ask, target, one))
            due += chance.expovariate(load.rate)
        return tuple(future.result() for future in asked)


def _has_picture(load: Load, index: int) -> bool:
    """The share is kept over every stretch of requests, not by chance."""
    return math.floor((index + 1) * load.picture_share) > math.floor(index * load.picture_share)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile, and greatest; zeros if there are none."""
    known = sorted(values)
    if not known:
        return {"p50": 0.0, "p95": 0.0, "p99": 0.0, "max": 0.0}
    at = {name: known[max(0, math.ceil(share * len(known)) - 1)] for name, share in (("p95", 0.95), ("p99", 0.99))}
    return {"p50": statistics.median(known), **at, "max": known[-1]}


# Shown -------------------------------------------------------------------------------------------------------------


def show(report: Report, out: TextIO) -> None:
    """The figures as a table."""
    found = report.figures()
    console = open_console(out)
    how = (
        f"{found['arrivals_per_s']:g} arrivals a second" if report.load.rate else f"{report.load.concurrency} at a time"
    )
    failed = f", {found['failed']} failed" if found["failed"] else ""
    console.print(f"{found['requests']} requests to {found['url']}, {found['pictures']} with a picture, {how}{failed}")
    console.print(
        f"{found['seconds']:.2f} s, {found['requests_per_s']:.2f} requests/s, {found['tokens_per_s']:.1f} tokens/s; "
        f"{found['prompt_tokens']:.0f} tokens of prompt and {found['answer_tokens']:.0f} of answer each"
    )
    if found["checked"]:
        console.print(f"{found['equal_to_alone']} of {found['checked']} answers equal to the same request alone")
    headings = [Column(f"{name} s", justify="right") for name in ("p50", "p95", "p99", "max")]
    table = Table("", *headings, box=box.SIMPLE_HEAD)
    for name, label in (("ttft", "to the first token"), ("gap", "between two pieces"), ("whole", "to the end")):
        table.add_row(label, *(f"{found[name][which]:.3f}" for which in ("p50", "p95", "p99", "max")))
    console.print(table)
    for error in sorted({answer.error for answer in report.answers if answer.error is not None})[:5]:
        console.print(f"failed: {error}", style="red", markup=False)


def plot(report: Report, path: Path) -> None:
    """The distributions of first tokens, gaps and whole answers. Needs matplotlib (the extra "bench")."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [answer for answer in report.answers if answer.error is None]
    series = {
        "to the first token": [answer.pieces[0] for answer in done if answer.pieces],
        "between two pieces": [b - a for answer in done for a, b in pairwise(answer.pieces)],
        "to the end": [answer.seconds for answer in done],
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2))
    for axis, (label, values) in zip(axes, series.items(), strict=True):
        ordered = sorted(values)
        axis.plot(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))])
        axis.set(title=label, xlabel="seconds", ylim=(0, 1.02))
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of them within")
    figure.suptitle(f"{report.target.model}: {len(done)} answers, {report.figures()['requests_per_s']:.2f} requests/s")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# The command line --------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that speak of a server."""
    group = parser.add_argument_group("a server (with --url)")
    group.add_argument(
        "--url", help="a server that speaks OpenAI's chat completions, to be measured instead of a model"
    )
    group.add_argument("--preset", choices=sorted(PRESETS), default="384", help="default: %(default)s")
    group.add_argument("--concurrency", type=int, metavar="N", help="requests that are always under way")
    group.add_argument("--sizes", nargs="+", metavar="WxH", help="the pictures' sizes")
    group.add_argument("--prompt-tokens", type=int, metavar="N", help="words of a prompt")
    group.add_argument("--max-tokens", type=int, metavar="N", help="of an answer")
    group.add_argument("--ignore-eos", action="store_true", help="ask for answers of full length")
    group.add_argument("--check", type=int, metavar="N", help="requests whose answers are compared with those alone")
    group.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="default: %(default)s")
    group.add_argument("--plot", metavar="FILE", help="a picture of the distributions")


def load_of(args: argparse.Namespace, *, requests: int | None, rate: float | None, pictures: float | None) -> Load:
    """The preset with what the command line says otherwise. Raises ValueError."""
    said = {
        "requests": requests,
        "rate": rate or None,
        "picture_share": pictures,
        "concurrency": args.concurrency,
        "sizes": None if args.sizes is None else tuple(_size(text) for text in args.sizes),
        "prompt_tokens": args.prompt_tokens,
        "answer_tokens": args.max_tokens,
        "ignore_eos": args.ignore_eos or None,
        "check": args.check,
    }
    return replace(
        PRESETS[args.preset], seed=args.seed, **{name: value for name, value in said.items() if value is not None}
    )


def target_of(args: argparse.Namespace) -> Target:
    """The server. Raises ValueError without a model's name or with a URL that is none."""
    if not args.model:
        raise ValueError("--url needs --model NAME: what the server calls its model")
    target = Target(args.url, args.model, os.environ.get(API_KEY), args.timeout)
    target.connect()[0].close()
    return target


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and 1 <= int(width) <= 20_000 and 1 <= int(height) <= 20_000):
        raise ValueError(f"{text} is no size; 384x384 is one")
    return int(width), int(height)
