"""A job's statistics, in bounded memory."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import random
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from vlm_batch.inputs.images import load_image
from vlm_batch.jobs.questions import Item
from vlm_batch.types import Result, Timings

#: Buckets of latency for each factor of ten, from a millisecond to a day.
BUCKETS_A_DECADE = 6
FIRST_SECONDS = 1e-3
NUM_BUCKETS = 8 * BUCKETS_A_DECADE
#: Most failures listed, kinds of failure, sample answers, bins over time, and repeated ids named.
MAX_FAILURES, MAX_REASONS, MAX_SAMPLES, MAX_BINS, MAX_AGAIN = 200, 50, 24, 120, 3
#: Most seconds that are kept as they are, for quantiles: of more, a uniform sample.
MAX_KEPT = 4096
#: Most characters of the message shown for a kind of failure, and of those that decide which kind it is.
MAX_REASON, MAX_READ = 120, 1000
#: Most characters of a sample's prompt and answer, and of a listed failure.
MAX_SAMPLE = 20_000
THUMBNAIL_SIDE = 240

STAGES = {
    "reading": "files and URLs into memory, several at a time",
    "processing": "decoding pictures and the model's processor, on a thread for each core",
    "waiting": "for room with the loaders and in the batch",
    "encoding": "pictures to features",
    "prefill": "the prompt, shared with other rows",
    "decode": "the answer, shared with other rows",
}


def stages_of(timings: Timings) -> dict[str, float]:
    waiting = max(0.0, timings.queue - timings.read - timings.process)
    parts = (
        timings.read,
        timings.process,
        waiting,
        timings.encode,
        timings.prefill,
        timings.decode,
    )
    return dict(zip(STAGES, parts, strict=True))


@dataclass
class Histogram:
    """Counts of seconds in logarithmic buckets, and some of the seconds themselves."""

    counts: list[int] = field(default_factory=lambda: [0] * NUM_BUCKETS)
    least: float = math.inf
    most: float = 0.0
    kept: list[float] = field(default_factory=list)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, seconds: float) -> None:
        self.least = min(self.least, seconds)
        self.most = max(self.most, seconds)
        decades = math.log10(max(seconds, FIRST_SECONDS) / FIRST_SECONDS)
        self.counts[min(int(decades * BUCKETS_A_DECADE), NUM_BUCKETS - 1)] += 1
        if len(self.kept) < MAX_KEPT:
            self.kept.append(seconds)
            return
        place = self._random.randrange(sum(self.counts))
        if place < MAX_KEPT:
            self.kept[place] = seconds

    @staticmethod
    def edge(bucket: int) -> float:
        return FIRST_SECONDS * float(10 ** (bucket / BUCKETS_A_DECADE))

    def quantile(self, share: float) -> float:
        """Return the seconds within which a share of the rows ended; of more than ``MAX_KEPT`` rows, of a sample."""
        if not self.kept:
            return 0.0
        rank = math.ceil(share * len(self.kept))
        return sorted(self.kept)[max(0, rank - 1)]

    def filled(self) -> list[tuple[float, float, int]]:
        """Return (least, most, count) of the used buckets; the outer two end at the least and the most seconds."""
        used = [bucket for bucket, count in enumerate(self.counts) if count]
        if not used:
            return []
        buckets = range(used[0], used[-1] + 1)
        edges = [self.least, *map(self.edge, buckets[1:]), self.most]
        counts = self.counts[used[0] : used[-1] + 1]
        return list(zip(edges, edges[1:], counts, strict=False))


@dataclass
class Course:
    """Ended rows over time, in bins of doubling width."""

    width: float = 0.05
    counts: list[int] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        while seconds >= self.width * MAX_BINS:
            pairs = itertools.zip_longest(
                self.counts[::2], self.counts[1::2], fillvalue=0
            )
            self.counts = list(map(sum, pairs))
            self.width *= 2
        bin_number = int(seconds / self.width)
        self.counts += [0] * (bin_number + 1 - len(self.counts))
        self.counts[bin_number] += 1


#: Words of a message that differ between rows: paths, file names, numbers.
_OWN_WORDS = re.compile(r"\S*(?:[\d/\\]|\w\.\w)\S*")


def _without(names: Iterable[str], message: str) -> str:
    """Return a message with 0 in the place of each name."""
    for name in names:
        # or long names would cost far more than they are worth
        if name and name in message:
            message = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "0", message)
    return message


@dataclass
class Kinds:
    """Failures by kind: messages equal but for names and numbers."""

    counts: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, str] = field(default_factory=dict)

    def add(self, message: str, names: Iterable[str] = ()) -> None:
        """Count a message about a row, which may hold the row's names."""
        kind = _OWN_WORDS.sub("0", _without(names, message[:MAX_READ]))
        is_full = len(self.counts) >= MAX_REASONS
        if is_full and kind not in self.counts:
            kind = message = "others"
        if len(message) > MAX_REASON:
            message = f"{message[: MAX_REASON - 3]}..."
        self.firsts.setdefault(kind, message)
        self.counts[kind] += 1

    def most_common(self, number: int | None = None) -> list[tuple[str, int]]:
        """Return each kind's first message and count."""
        return [
            (self.firsts[kind], count)
            for kind, count in self.counts.most_common(number)
        ]


@dataclass(frozen=True)
class Sample:
    """A sample answer with a thumbnail."""

    id: str
    prompt: str | None
    text: str
    jpeg: bytes | None


@dataclass
class Summary:
    """A job's figures.

    Attributes:
        done_before: Rows answered by earlier runs.
        failed_before: Rows that failed in earlier runs.
        again: Rows skipped because an earlier row has their id; ``again_ids`` has the first ids.
        otherwise: Rows of standard input, answered before, that ask something else now.
        cut: Answers cut at their longest length.
        source: Seconds of reading rows.
        busy: Seconds with rows in the engine; None if unknown.
        in_batch: Seconds of answered rows without what they waited for.
    """

    total: int | None = None
    done_before: int = 0
    failed_before: int = 0
    keeps_samples: bool = False
    answered: int = 0
    failed: int = 0
    again: int = 0
    again_ids: list[str] = field(default_factory=list)
    otherwise: int = 0
    cut: int = 0
    pictures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    interrupted: bool = False
    began: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    in_batch: Histogram = field(default_factory=Histogram)
    first_tokens: Histogram = field(default_factory=Histogram)
    course: Course = field(default_factory=Course)
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    source: float = 0.0
    busy: float | None = None
    reasons: Kinds = field(default_factory=Kinds)
    failures: list[tuple[str, str]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def ended_rows(self) -> int:
        return self.answered + self.failed

    @property
    def asked_rows(self) -> int | None:
        """Rows this run asks, with those that its sources have grown by."""
        if self.total is None:
            return None
        return max(self.total - self.done_before - self.failed_before, self.ended_rows)

    @property
    def num_failed(self) -> int:
        return self.failed + self.failed_before

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last answer."""
        return max(self.ended - self.began, 1e-9)

    @property
    def busy_share(self) -> float | None:
        if self.busy is None:
            return None
        return min(1.0, self.busy / self.seconds)

    @property
    def mean_stages(self) -> list[tuple[str, str, float]]:
        means = [
            (name, said, self.stages[name] / max(1, self.answered))
            for name, said in STAGES.items()
        ]
        source = self.source / max(1, self.ended_rows)
        return [
            *means,
            ("source", "rows and pages of the source, one at a time", source),
        ]

    def begin(self) -> None:
        self.began = self.ended = time.perf_counter()

    def skip(self, row_id: str) -> None:
        """Count a row whose id an earlier row has."""
        self.again += 1
        if len(self.again_ids) < MAX_AGAIN:
            self.again_ids.append(row_id)

    def add(self, item: Item, result: Result, at: float | None = None) -> None:
        """Count a row ended now, or ``at`` seconds after the beginning."""
        if at is None:
            self.ended = time.perf_counter()
        else:
            self.ended = max(self.ended, self.began + at)
        self.course.add(self.ended - self.began)
        self.pictures += len(result.image_sizes)
        if result.error is None:
            self._add_answer(item, result)
            return
        self.failed += 1
        self.reasons.add(result.error, item.names)
        if len(self.failures) < MAX_FAILURES:
            self.failures.append((item.id, result.error[:MAX_SAMPLE]))

    def _add_answer(self, item: Item, result: Result) -> None:
        self.answered += 1
        self.cut += result.finish_reason == "length"
        timings, usage = result.timings, result.usage
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        for one in (result, *result.others):
            self.tokens += one.usage.completion_tokens
        if not math.isnan(timings.total):
            self.in_batch.add(timings.total - timings.queue)
        if not math.isnan(timings.ttft):
            self.first_tokens.add(timings.ttft)
        for stage, seconds in stages_of(timings).items():
            self.stages[stage] += seconds
        if self.keeps_samples:
            self._keep(item, result)

    def _keep(self, item: Item, result: Result) -> None:
        """Keep a uniform sample (reservoir sampling)."""
        place = len(self.samples)
        if place >= MAX_SAMPLES:
            place = self._random.randrange(self.answered)
        if place >= MAX_SAMPLES:
            return
        prompt = None if item.prompt is None else item.prompt[:MAX_SAMPLE]
        sample = Sample(item.id, prompt, result.text[:MAX_SAMPLE], thumbnail(item))
        self.samples[place : place + 1] = [sample]


def thumbnail(item: Item) -> bytes | None:
    """Return a small JPEG of a row's first picture; None if it cannot be read."""
    # a picture that has gone since is not worth the report
    with contextlib.suppress(Exception):
        picture = load_image(item.row.pictures()[0])
        picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
        out = io.BytesIO()
        picture.save(out, format="JPEG", quality=80)
        return out.getvalue()
    return None
