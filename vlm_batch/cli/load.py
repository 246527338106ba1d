"""A load on a model, or on a server with OpenAI's chat completions, and what came of it.

Requests arrive at random (Poisson), or a fixed number runs (closed loop). Some are asked again alone.
"""

from __future__ import annotations

import base64
import io
import json
import math
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from vlm_batch.checks import demand
from vlm_batch.types import Request, SamplingParams, Timings

if TYPE_CHECKING:
    from vlm_batch.batcher import VLMBatcher

#: Words for prompts, about a token each.
WORDS = (
    "the", "picture", "shows", "a", "small", "red", "boat", "near", "green", "hills", "two", "people", "look", "at", "old",
)  # fmt: skip
#: Most requests under way when they arrive at random.
MAX_OPEN = 1024
STAGES = ("queue", "encode", "prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class Load:
    """A benchmark's requests and their rate.

    Attributes:
        concurrency: Requests always under way; None for random arrivals.
        rate: Arrivals a second; 0 sends all at once, None takes twice the rate of single requests.
        sizes: (width, height) of pictures, in turn.
        picture_share: Share of requests with a picture.
        prompt_words: (least, most), drawn log-uniformly; ``answer_tokens`` likewise.
        ignore_eos: Answers have full length; not every server knows it.
        check: First requests that are also asked alone.
    """

    requests: int = 32
    concurrency: int | None = None
    rate: float | None = None
    sizes: tuple[tuple[int, int], ...] = (
        (448, 336),
        (224, 560),
        (336, 336),
        (560, 448),
        (224, 224),
    )
    picture_share: float = 0.5
    prompt_words: tuple[int, int] = (24, 900)
    answer_tokens: tuple[int, int] = (8, 128)
    ignore_eos: bool = True
    check: int = 0
    seed: int = 4

    def __post_init__(self) -> None:
        if self.requests < 1 or (self.concurrency is not None and self.concurrency < 1):
            raise ValueError("requests and concurrency must be at least 1")
        for option, (least, most) in (
            ("--prompt-words", self.prompt_words),
            ("--answer-tokens", self.answer_tokens),
        ):
            if not 1 <= least <= most:
                raise ValueError(
                    f"{option} {least} {most}: the least must be at least 1 and no more than the most"
                )
        is_rate = 0 <= (self.rate or 0) < math.inf
        finite = "a finite number, at least 0"
        demand(is_rate, ValueError, "the rate", self.rate, finite)
        share = self.picture_share
        demand(0 <= share <= 1, ValueError, "the share of pictures", share, "in 0..1")

    def has_picture(self, index: int) -> bool:
        return math.floor((index + 1) * self.picture_share) > math.floor(
            index * self.picture_share
        )

    def request(self, index: int) -> Request:
        """Make a request that depends only on load and index."""
        chance = random.Random(f"{self.seed}/{index}")
        words = " ".join(
            chance.choice(WORDS) for _ in range(_between(chance, self.prompt_words))
        )
        tokens = _between(chance, self.answer_tokens)
        pictures = (
            (picture(self.sizes[index % len(self.sizes)], chance),)
            if self.has_picture(index)
            else ()
        )
        params = SamplingParams(max_tokens=tokens, ignore_eos=self.ignore_eos)
        return Request(prompt=words, images=pictures, params=params)


_SERVED = Load(requests=64, concurrency=8, picture_share=1.0, ignore_eos=False, check=8)
#: Named loads. "chat" resembles a chat server's; "384" is the load of a published figure on Apple hardware.
PRESETS: dict[str, Load] = {
    "chat": Load(),
    "384": replace(
        _SERVED, sizes=((384, 384),), prompt_words=(256, 256), answer_tokens=(128, 128)
    ),
    "documents": replace(
        _SERVED,
        requests=32,
        sizes=((1240, 1754), (850, 1100)),
        prompt_words=(48, 48),
        answer_tokens=(256, 256),
    ),
    "text": replace(
        _SERVED,
        concurrency=16,
        picture_share=0.0,
        prompt_words=(256, 256),
        answer_tokens=(128, 128),
    ),
}


@dataclass(frozen=True)
class TimedAnswer:
    """One streamed answer, or its error; ``pieces`` are its text's arrival times in seconds."""

    text: str = ""
    pieces: tuple[float, ...] = ()
    seconds: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    error: str | None = None
    timings: Timings | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token, or text if tokens are unknown."""
        if self.timings is not None:
            return self.timings.ttft
        return self.pieces[0] if self.pieces else None


@dataclass(frozen=True)
class Report:
    """The outcome of a load; ``alone`` are the first requests' answers alone."""

    load: Load
    asked: str
    answers: tuple[TimedAnswer, ...]
    alone: tuple[TimedAnswer, ...]
    seconds: float

    @property
    def done(self) -> list[TimedAnswer]:
        return [answer for answer in self.answers if answer.error is None]

    def times(self) -> dict[str, list[float]]:
        """Return seconds to first tokens, between pieces, and to the end."""
        return {
            "ttft": [answer.ttft for answer in self.done if answer.ttft is not None],
            "gap": [b - a for answer in self.done for a, b in pairwise(answer.pieces)],
            "whole": [answer.seconds for answer in self.done],
        }

    def figures(self) -> dict[str, Any]:
        done = self.done
        tokens = sum(answer.tokens for answer in done)
        pairs = [
            (alone.text, beside.text)
            for alone, beside in zip(self.alone, self.answers, strict=False)
            if alone.error is None and beside.error is None
        ]
        found: dict[str, Any] = {
            "asked": self.asked,
            "requests": len(self.answers),
            "failed": len(self.answers) - len(done),
            "concurrency": self.load.concurrency,
            "arrivals_per_s": self.load.rate,
            "pictures": sum(map(self.load.has_picture, range(self.load.requests))),
            "prompt_tokens": sum(one.prompt_tokens for one in done) / max(1, len(done)),
            "answer_tokens": tokens / max(1, len(done)),
            "seconds": self.seconds,
            "requests_per_s": len(done) / self.seconds,
            "tokens_per_s": tokens / self.seconds,
            **{name: spread(values) for name, values in self.times().items()},
            "checked": len(pairs),
            "equal_to_alone": sum(alone == beside for alone, beside in pairs),
        }
        timings = [one.timings for one in done if one.timings is not None]
        if timings:
            found["stages"] = _stages(timings)
        return found


def _stages(timings: Sequence[Timings]) -> dict[str, Any]:
    """Return the stages' shares of the time, and what a request spent in each."""
    spent = {stage: [vars(one)[stage] for one in timings] for stage in STAGES}
    whole = sum(map(sum, spent.values()))
    found = {}
    for stage, seconds in spent.items():
        found[stage] = {"share": sum(seconds) / whole, **spread(seconds)}
    return found


# Who is asked ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Local:
    batcher: VLMBatcher
    name: str = "in process"

    def prepare(self, request: Request) -> Request:
        return request

    def ask(self, prepared: Any) -> TimedAnswer:
        begin = time.perf_counter()
        handle = self.batcher.submit_request(prepared)
        pieces = tuple(time.perf_counter() - begin for _ in handle)
        result, seconds = handle.result(), time.perf_counter() - begin
        usage = result.usage
        return TimedAnswer(
            result.text,
            pieces,
            seconds,
            usage.prompt_tokens,
            usage.completion_tokens,
            result.error,
            result.timings,
        )


@dataclass(frozen=True)
class BenchedServer:
    """A model on a server, asked with the standard library's client."""

    url: str
    model: str
    key: str | None = None
    timeout: float = 600.0

    @property
    def name(self) -> str:
        return f"{self.model} at {self.url}"

    def connect(self) -> tuple[HTTPConnection, str]:
        """Return a connection and the path of chat completions."""
        parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url} is no http(s) URL")
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        base = parts.path.rstrip("/")
        path = f"{base if base.endswith('/v1') else f'{base}/v1'}/chat/completions"
        return kind(parts.hostname, parts.port, timeout=self.timeout), path

    def prepare(self, request: Request) -> bytes:
        pictures = [
            "data:image/jpeg;base64," + base64.b64encode(one).decode()
            for one in request.images
        ]
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": url}} for url in pictures
        ]
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [
                {
                    "role": "user",
                    "content": [*content, {"type": "text", "text": request.prompt}],
                }
            ],
            "max_tokens": request.params.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.params.ignore_eos:
            fields["ignore_eos"] = True
        return json.dumps(fields).encode()

    def ask(self, prepared: Any) -> TimedAnswer:
        """Return a streamed answer, or its error."""
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        connection, path = self.connect()
        begin = time.perf_counter()
        try:
            connection.request("POST", path, prepared, headers)
            response = connection.getresponse()
            if response.status != 200:
                return TimedAnswer(
                    error=f"HTTP {response.status}: {response.read(300).decode('utf-8', 'replace')}"
                )
            return _read(response, begin)
        except (OSError, HTTPException, ValueError) as error:
            return TimedAnswer(
                error=f"{type(error).__name__}: {error}",
                seconds=time.perf_counter() - begin,
            )
        finally:
            connection.close()


def _read(response: Any, begin: float) -> TimedAnswer:
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
            return TimedAnswer(error=str(event["error"])[:300], seconds=now)
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            text = (delta.get("reasoning_content") or delta.get("reasoning") or "") + (
                delta.get("content") or ""
            )
            has_ended = has_ended or bool(choice.get("finish_reason"))
            if text:
                said.append(text)
                times.append(now)
    if not has_ended:
        return TimedAnswer(
            error="the stream broke off", seconds=time.perf_counter() - begin
        )
    tokens = usage.get("completion_tokens", len(times))
    return TimedAnswer(
        "".join(said),
        tuple(times),
        time.perf_counter() - begin,
        int(usage.get("prompt_tokens", 0)),
        int(tokens),
    )


# The load ----------------------------------------------------------------------------------------------------------


def measure(target: Local | BenchedServer, load: Load) -> Report:
    """Run the load, then ask some requests alone: asked before, their cached prompts would lighten it."""
    asked = [target.prepare(load.request(index)) for index in range(load.requests)]
    target.ask(
        target.prepare(replace(load, answer_tokens=(4, 4)).request(load.requests))
    )
    if load.concurrency is None and load.rate is None:
        begin = time.perf_counter()
        target.ask(target.prepare(load.request(load.requests + 1)))
        load = replace(load, rate=2 / (time.perf_counter() - begin))
    begin = time.perf_counter()
    with ThreadPoolExecutor(min(load.concurrency or MAX_OPEN, len(asked))) as pool:
        if load.concurrency is not None:
            answers = tuple(pool.map(target.ask, asked))
        else:
            chance, due, waiting = random.Random(load.seed), begin, []
            for one in asked:  # arrivals do not wait for answers
                time.sleep(max(0.0, due - time.perf_counter()))
                waiting.append(pool.submit(target.ask, one))
                due += chance.expovariate(load.rate) if load.rate else 0.0
            answers = tuple(future.result() for future in waiting)
    seconds = time.perf_counter() - begin
    return Report(
        load, target.name, answers, tuple(map(target.ask, asked[: load.check])), seconds
    )


def picture(size: tuple[int, int], chance: random.Random) -> bytes:
    """Return noise as a JPEG, different each time against caches."""
    noise = np.random.default_rng(chance.getrandbits(32)).integers(
        0, 256, (16, 16, 3), dtype=np.uint8
    )
    held = io.BytesIO()
    Image.fromarray(noise).resize(size).save(held, "JPEG", quality=90)
    return held.getvalue()


def _between(chance: random.Random, limits: tuple[int, int]) -> int:
    low, high = limits
    return min(high, round(low * (high / low) ** chance.random()))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, 95th and 99th percentile, and maximum."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    if not known.size:
        return {"p50": 0.0, "p95": 0.0, "p99": 0.0, "max": 0.0}
    high, highest = np.quantile(known, (0.95, 0.99), method="inverted_cdf").tolist()
    median, most = float(np.median(known)), float(known.max())
    return {"p50": median, "p95": high, "p99": highest, "max": most}
