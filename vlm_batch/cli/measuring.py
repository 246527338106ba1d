"""Engine settings, measured for a model on this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.towers import remember_features
from vlm_batch.arrays import arrays_of
from vlm_batch.caches import Placement, can_share
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.limit import LADDER, RowLimit
from vlm_batch.engine.shapes import FreeShapes
from vlm_batch.engine.trial import Trial, TrialRow
from vlm_batch.policy import Policy, policy_of
from vlm_batch.records import Encoded
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.features import FeatureStore

#: Tokens of decoding rows, of the chunked prompt, and of prompts that share an array.
CONTEXT, PROMPT, SHORT = 256, 2048, 96
CHUNKS = (64, 128, 256, 512, 1024, 2048)
TOGETHER = (1, 2, 4, 8, 16, 32)
#: Different lengths of decoding rows, as in a real batch, where they cost a slab.
LENGTHS = 4
#: Steps, and runs of everything else, whose median counts, after one warm-up.
STEPS, RUNS = 8, 3
MOST_ROWS = 64
#: Relative gain below which a difference counts as noise.
MARGIN = 0.05

Inputs = Mapping[str, Any]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """Measured seconds; empty where the family lacks something, or time ran out.

    ``decode`` is for a step by layout and rows, ``chunks`` for a token by chunk length, ``prompts`` and ``pictures``
    for one by number per call.
    """

    decode: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    chunks: Mapping[int, float] = field(default_factory=dict)
    prompts: Mapping[int, float] = field(default_factory=dict)
    pictures: Mapping[int, float] = field(default_factory=dict)


def measure(
    adapter: Adapter,
    kv: KVQuantisation | None,
    pictures: Sequence[Inputs] = (),
    *,
    seconds: float = 120.0,
    say: Progress = lambda said: None,
) -> Measured:
    """Measure a model on this idle machine.

    Args:
        pictures: Processor outputs of one picture each.
        seconds: Time after which nothing new begins.
    """
    clock = _StepClock(time.perf_counter() + seconds)
    remember_features(adapter, FeatureStore(ByteBudget(0)))
    trial = Trial(adapter, kv, FreeShapes())
    decode = _decode(trial, clock, say)
    say("prompts in chunks")
    prompt = trial.prompt(max(2, _most(adapter, PROMPT + 8) - 8))
    chunks = _chunks(trial, prompt, clock)
    prompts = _prompts(trial, min(SHORT, prompt.length), clock, say)
    looked: dict[int, float] = {}
    if pictures:
        say("pictures in one call")
        together = [number for number in TOGETHER if number <= len(pictures)]
        looked = _climb(
            clock, together, lambda n: lambda: _looked(adapter, pictures[:n])
        )
    return Measured(
        decode,
        {size: spent / prompt.length for size, spent in chunks.items()},
        _each(prompts),
        _each(looked),
    )


def _decode(
    trial: Trial, clock: _StepClock, say: Progress
) -> dict[str, dict[int, float]]:
    """Return seconds of a step, by layout and rows; none of a family that decodes one row, or has no room."""
    adapter = trial.adapter
    context = _most(adapter, CONTEXT + MOST_ROWS) - MOST_ROWS
    if adapter.spec.max_rows == 1 or context <= 8:
        return {}
    say("decode steps")
    parts = range(1, LENGTHS + 1)
    rows = [trial.row(max(2, context * part // LENGTHS)) for part in parts]
    found = {}
    for layout in Placement:
        step = partial(_step, Trial(adapter, trial.kv, FreeShapes(layout)), rows)
        found[layout.value] = _climb(clock, _rows(adapter), step)
    return found


def _chunks(trial: Trial, prompt: Encoded, clock: _StepClock) -> dict[int, float]:
    """Return seconds of a whole prompt, by the length of its chunks; none where it may not be cut."""
    if not trial.adapter.spec.chunked_prefill or prompt.atomic:
        return {}
    sizes = [size for size in CHUNKS if size < prompt.length] or [prompt.length]

    def make(size: int) -> Callable[[], None]:
        return partial(_in_chunks, trial, prompt, size)

    found = {}
    for size in sizes:
        spent = clock.timed(make, size)
        if spent is not None:
            found[size] = spent
    return found


def _prompts(
    trial: Trial, length: int, clock: _StepClock, say: Progress
) -> dict[int, float]:
    """Return seconds of prompts in one array, by their number; none where they cannot share one."""
    adapter = trial.adapter
    if not adapter.is_causal or not can_share(adapter.make_cache(trial.kv)):
        return {}
    say("prompts in one array")
    short = trial.prompt(length)
    return _climb(
        clock, TOGETHER, lambda n: lambda: _wait(*trial.prefilled([short] * n)[:2])
    )


def _each(spent: Mapping[int, float]) -> dict[int, float]:
    """Return seconds for one, of seconds by number."""
    return {number: seconds / number for number, seconds in spent.items()}


class _StepClock:
    def __init__(self, ends: float) -> None:
        self._ends = ends

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self._ends

    def timed(
        self, make: Callable[[int], Callable[[], Any]], count: int, runs: int = RUNS
    ) -> float | None:
        """Return the median time of what is made of a count, after one warm-up; None if it is too late to begin."""
        if self.is_late:
            return None
        work = make(count)
        work()
        taken = []
        for _ in range(runs):
            begin = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken)


def _climb(
    clock: _StepClock, counts: Sequence[int], make: Callable[[int], Callable[[], Any]]
) -> dict[int, float]:
    """Return seconds by ascending count, until sharing fails to pay twice in a row."""
    found: dict[int, float] = {}
    worse, best = 0, math.inf
    for count in counts:
        spent = clock.timed(make, count, STEPS)
        if spent is None:
            break
        found[count] = spent
        worse = worse + 1 if spent / count > best else 0
        best = min(best, spent / count)
        if worse == 2:
            break
    return found


def _rows(adapter: Adapter) -> list[int]:
    most = min(MOST_ROWS, adapter.spec.max_rows or MOST_ROWS)
    return [rows for rows in LADDER if rows <= most]


def _most(adapter: Adapter, tokens: int) -> int:
    if adapter.max_context is None:
        return tokens
    return min(tokens, adapter.max_context - 1)


def _step(trial: Trial, rows: Sequence[TrialRow], count: int) -> Callable[[], None]:
    steps = trial.steps([rows[place % len(rows)] for place in range(count)], count)
    return lambda: mx.eval(mx.argmax(next(steps), axis=-1))


def _in_chunks(trial: Trial, prompt: Encoded, size: int) -> None:
    caches = trial.adapter.make_cache(trial.kv)
    for start in range(0, prompt.length, size):
        _wait(
            trial.adapter.prefill(
                [prompt], caches, start, min(start + size, prompt.length)
            ),
            caches,
        )


def _wait(logits: mx.array, caches: Sequence[Any]) -> None:
    mx.eval(logits, arrays_of([cache.state for cache in caches]))


def _looked(adapter: Adapter, pictures: Sequence[Inputs]) -> None:
    found = adapter.encode_together(pictures) if len(pictures) > 1 else pictures
    mx.eval([adapter.encode(inputs).inputs_embeds for inputs in found])


def settings_of(measured: Measured, policy: Policy | None = None) -> dict[str, Any]:
    """Return settings that beat a policy's, by default the device's.

    These are the most rows that pay, the faster layout, and chunks, prompts and pictures within ``MARGIN`` of the
    cheapest.
    """
    policy = policy or policy_of({})
    found = _layout(measured.decode, policy)
    if len(measured.chunks) > 1:
        cheap = _cheap(measured.chunks)
        longest = max(cheap)
        budget = longest * max(1, policy.idle_budget // policy.max_chunk)
        found |= {
            "max_chunk": longest,
            "smallest_chunk": min(cheap),
            "idle_budget": budget,
        }
    if measured.prompts:
        found["prefill_together"] = min(_cheap(measured.prompts))
    if measured.pictures:
        found["encode_together"] = min(_cheap(measured.pictures))
    return found


def _layout(
    decode: Mapping[str, Mapping[int, float]], policy: Policy
) -> dict[str, Any]:
    """Return the faster layout and the rows that pay in it; the policy's layout if it is about as fast."""
    rows, shares = {}, {}
    for layout, times in decode.items():
        if times:
            rows[layout] = _pays(times, policy.token_gap)
            shares[layout] = times[rows[layout]] / rows[layout]
    if not shares:
        return {}
    placement = min(shares, key=shares.__getitem__)
    enough = shares[placement] * (1 + 2 * MARGIN)
    if shares.get(policy.placement, math.inf) <= enough:
        placement = policy.placement
    most = rows[placement]
    return {"placement": placement, "first_rows": most, "most_rows": most}


def _pays(times: Mapping[int, float], gap: float) -> int:
    """Return the fewest rows that more cannot beat by ``RowLimit.GAIN``."""
    counts = [rows for rows in sorted(times) if times[rows] <= gap] or [min(times)]
    shares = {rows: times[rows] / rows for rows in counts}
    cheapest = min(shares.values())
    return next(
        rows for rows in counts if cheapest >= shares[rows] * (1 - RowLimit.GAIN)
    )


def _cheap(costs: Mapping[int, float]) -> list[int]:
    cheapest = min(costs.values())
    return [count for count, cost in costs.items() if cost <= cheapest * (1 + MARGIN)]
