"""One run of one engine over one workload, and the figures of it."""

from __future__ import annotations

import gc
import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compare.engines import Engine, OneAfterAnother
from benchmarks.compare.shapes import parameters
from benchmarks.compare.workloads import Ask, Workload

#: Seconds without any token after which a run counts as hung.
PATIENCE = 120.0
#: How many of the likeliest tokens of a step are kept, to judge another engine's other choice.
KEPT = 16


class WorkClock:
    """Stands in for ``time.perf_counter`` in a process: counts the process's CPU time, and what it would have slept.

    On a CPU that other work shares, wall time says more of the others than of the engine; this clock keeps going only
    while the engine computes. It is set for the whole process, so that schedulers that look at the time see it too.
    """

    def __init__(self) -> None:
        self.slept = 0.0

    def __call__(self) -> float:
        return time.process_time() + self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += max(0.0, seconds)

    def install(self) -> None:
        time.perf_counter, time.sleep = self, self.sleep  # type: ignore[assignment]


@dataclass
class Trace:
    """What came out of a run, and when. Times are seconds from the run's start."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    # when an ask was due: its arrival, or its turn
    handed: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    peak: int = 0  # bytes of MLX arrays beyond those that were there before
    rss: int = 0  # bytes, the process's highest


def drive(engine: Engine, workload: Workload, trace: Trace) -> None:
    """Hand over each ask when it is due and step until all have their tokens.

    Raises RuntimeError for an engine that gives no more tokens.
    """
    due = list(workload.asks)
    missing = {ask.name: ask.max_tokens for ask in due}
    alive = 0
    start = last = time.perf_counter()
    while missing:
        now = time.perf_counter() - start
        while (
            due
            and due[0].arrival <= now
            and (workload.in_flight is None or alive < workload.in_flight)
        ):
            ask = due.pop(0)
            trace.handed[ask.name] = (
                now if workload.in_flight is not None else ask.arrival
            )
            engine.add(ask)
            alive += 1
        if not alive:
            time.sleep(max(0.0, due[0].arrival - (time.perf_counter() - start)))
            continue
        tokens = engine.step()
        now = time.perf_counter()
        if tokens:
            last = now
        elif now - last > PATIENCE:
            raise RuntimeError(
                f"no token for {PATIENCE:.0f} s; {len(missing)} requests are without an end"
            )
        for name, token in tokens:
            trace.tokens.setdefault(name, []).append(token)
            trace.times.setdefault(name, []).append(now - start)
            missing[name] -= 1
            if not missing[name]:
                del missing[name]
                alive -= 1
    trace.seconds = last - start


def measure(make: Any, model: Any, workload: Workload, contexts: Any) -> Trace:
    """Run an engine that ``make`` builds, with memory counted from a clean start."""
    import mlx.core as mx

    forget(model)
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    _reset_rss()
    trace = Trace()
    engine = make(model, workload, contexts)
    try:
        drive(engine, workload, trace)
    finally:
        engine.close()
    trace.peak = mx.get_peak_memory() - before
    trace.rss = _peak_rss()
    del engine
    mx.clear_cache()  # the other engines' processes need the room
    return trace


def forget(model: Any) -> None:
    """Drop what an earlier request left on mlx-vlm's language model."""
    for name in ("_position_ids", "_rope_deltas"):
        if hasattr(model.language_model, name):
            setattr(model.language_model, name, None)


def figures(workload: Workload, trace: Trace) -> dict[str, float]:
    """Requests and tokens a second, waiting times in seconds, memory in MB."""
    ttft = [times[0] - trace.handed[name] for name, times in trace.times.items()]
    gaps = [
        later - sooner
        for times in trace.times.values()
        for sooner, later in pairwise(times)
    ]
    count = sum(len(tokens) for tokens in trace.tokens.values())
    found = {
        "seconds": trace.seconds,
        "requests_per_s": len(workload.asks) / trace.seconds,
        "tokens_per_s": count / trace.seconds,
        "ttft_p50": _percentile(ttft, 50),
        "ttft_p95": _percentile(ttft, 95),
        "itl_p50": _percentile(gaps, 50),
        "itl_p95": _percentile(gaps, 95),
        "itl_max": max(gaps, default=math.nan),
        "peak_mb": trace.peak / 1e6,
        "rss_mb": trace.rss / 1e6,
    }
    if workload.in_flight is not None and workload.in_flight > 1:
        found["step_ms"] = 1000 * _seconds_a_step(workload, trace)
    return found


def _seconds_a_step(workload: Workload, trace: Trace) -> float:
    """From the moment when every place was taken first to the last join, per token of a row."""
    firsts = sorted(times[0] for times in trace.times.values())
    begin, end = firsts[workload.rows - 1], firsts[-1]
    tokens = sum(begin < at <= end for times in trace.times.values() for at in times)
    return (end - begin) / (tokens / workload.rows)


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else math.nan


# Answers
# -------------------------------------------------------------------------------------------------------------------


def reference(model: Any, workload: Workload, path: Path) -> dict[str, float]:
    """Answer every distinct ask one after another and store the answers, with each step's likeliest tokens; its figures."""
    import mlx.core as mx

    top: dict[str, list[tuple[Any, Any]]] = {}

    def see(ask: Ask, token: int, logprobs: Any) -> None:
        best = mx.argpartition(-logprobs, kth=KEPT - 1)[:KEPT]
        pair = (best, logprobs[best].astype(mx.float32))
        mx.async_eval(pair)
        top.setdefault(ask.source, []).append(pair)

    distinct: dict[str, Ask] = {}
    for ask in workload.asks:
        known = distinct.get(ask.source)
        if known is None or known.max_tokens < ask.max_tokens:
            distinct[ask.source] = ask
    asked = Workload(workload.name, workload.title, list(distinct.values()), rows=1)
    trace = measure(partial(OneAfterAnother, see=see), model, asked, None)
    arrays: dict[str, np.ndarray] = {}
    for source, ask in distinct.items():
        arrays[f"{source}/tokens"] = np.array(trace.tokens[ask.name])
        arrays[f"{source}/best"] = np.stack([np.array(best) for best, _ in top[source]])
        arrays[f"{source}/logprobs"] = np.stack(
            [np.array(logprobs) for _, logprobs in top[source]]
        )
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    return figures(asked, trace)


def rounding(
    model: Any, ask: Ask, answers: Mapping[str, np.ndarray], step: int
) -> float:
    """The most by which the model's precision errs, in nats, on the likeliest tokens of one step of an answer.

    The model reads the prompt and the answer up to there once more in float32, with the same weights, and says how
    likely it finds the tokens that were the likeliest in the model's own precision. Raises ValueError for a model that
    is in float32 already.
    """
    import mlx.core as mx
    from mlx.utils import tree_unflatten

    kept = {
        path: array
        for path, array in parameters(model)
        if mx.issubdtype(array.dtype, mx.floating)
    }
    if all(array.dtype == mx.float32 for array in kept.values()):
        raise ValueError("the model is in float32: nothing here is more exact")
    ids = np.concatenate(
        [ask.inputs["input_ids"], answers[f"{ask.source}/tokens"][None, :step]], axis=1
    )
    longer = replace(
        ask, inputs={**ask.inputs, "input_ids": ids.astype(np.int32)}, max_tokens=1
    )
    seen: list[np.ndarray] = []

    def see(_: Ask, __: int, logprobs: Any) -> None:
        seen.append(np.array(logprobs.astype(mx.float32)))

    try:
        exact = {name: array.astype(mx.float32) for name, array in kept.items()}
        model.update(tree_unflatten(list(exact.items())))
        asked = Workload("exact", "one step in float32", [longer], rows=1)
        measure(partial(OneAfterAnother, see=see), model, asked, None)
    finally:
        model.update(tree_unflatten(list(kept.items())))
    best = answers[f"{ask.source}/best"][step]
    logprobs = answers[f"{ask.source}/logprobs"][step]
    return float(np.abs(seen[0][best] - logprobs).max())


@dataclass(frozen=True)
class Other:
    """The first other token of a row that differs, and how much less likely it was, in nats; inf if not among the likeliest."""

    step: int
    gap: float


@dataclass(frozen=True)
class Verdict:
    """How a run's tokens compare with the answers one after another: the rows that differ, by the name of their ask."""

    rows: int
    others: Mapping[str, Other]

    @property
    def gaps(self) -> dict[str, float]:
        return {name: other.gap for name, other in self.others.items()}

    def is_right(self, limits: Mapping[str, float]) -> bool:
        """Whether no row differs, or each only from a near-tie on: a gap within the row's limit (0 where there is none)."""
        return all(
            other.gap <= limits.get(name, 0.0) for name, other in self.others.items()
        )

    def describe(self, limits: Mapping[str, float]) -> str:
        if not self.others:
            return "same"
        name, worst = max(
            self.gaps.items(), key=lambda item: item[1] - limits.get(item[0], 0.0)
        )
        kind = "near-ties" if self.is_right(limits) else "WRONG"
        return f"{kind}: {len(self.others)} of {self.rows} rows, gap {worst:.2g} of {limits.get(name, 0.0):.2g}"


def compare(
    workload: Workload,
    tokens: Mapping[str, Sequence[int]],
    answers: Mapping[str, np.ndarray],
) -> Verdict:
    """Every ask's tokens against the stored answers."""
    others: dict[str, Other] = {}
    for ask in workload.asks:
        right = answers[f"{ask.source}/tokens"][: ask.max_tokens].tolist()
        given = list(tokens.get(ask.name, ()))
        if given == right:
            continue
        step = next(
            (i for i, (a, b) in enumerate(zip(given, right, strict=False)) if a != b),
            None,
        )
        if step is None or len(given) != len(right):
            others[ask.name] = Other(0, math.inf)
            continue
        best = answers[f"{ask.source}/best"][step].tolist()
        logprobs = answers[f"{ask.source}/logprobs"][step]
        known = given[step] in best
        gap = (
            float(logprobs.max() - logprobs[best.index(given[step])])
            if known
            else math.inf
        )
        others[ask.name] = Other(step, gap)
    return Verdict(len(workload.asks), others)


# The process's own memory
# ---------------------------------------------------------------------------------------------------


def _reset_rss() -> None:
    """Linux can start its high-water mark again; elsewhere it is the whole process's."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_rss() -> int:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024
