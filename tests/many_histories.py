"""Histories (``tests.histories``) in several processes at a time, and the sum of what several runs have played.

    python -m tests.histories --steps 1000000 --processes 16
    python -m tests.histories --merge FILES

The last line of a run is JSON: what it played, by which ``--merge`` adds up the outputs of several.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import logging
import multiprocessing
import os
import platform
import queue
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests import histories
from tests.histories import KINDS, play


@dataclass(frozen=True)
class News:
    """A process tells of a history: that it has begun (neither count nor fault), what happened in it, or how it failed."""

    process: int
    seed: int
    counts: Counter[str] | None = None
    fault: str = ""


@dataclass(frozen=True)
class How:
    """How histories are played."""

    length: int = 120  # operations of each
    processes: int = 1
    seconds: float | None = None  # no history begins after so long
    on_cpu: bool = False  # where there is a GPU, too

    def again(self, seed: int) -> str:
        """The command that plays a history again."""
        return f"python -m tests.histories --steps 1 --seed {seed} --length {self.length} --cpu"


def play_some(
    process: int, how: How, seeds: Any, ends: Any, news: Any, answers: Any = None
) -> None:
    """Play the next seeds until it ``ends``, or one fails: the whole of a process. ``answers``: those alone, of all."""
    if how.on_cpu:
        mx.set_default_device(mx.cpu)
    if answers is not None:
        histories.shared_answers = answers
    for played in itertools.count():
        with seeds.get_lock():
            seed, seeds.value = seeds.value, seeds.value + 1
        if ends.is_set():
            return
        news.put(News(process, seed))
        try:
            news.put(News(process, seed, play(seed, how.length)))
        except BaseException:
            news.put(News(process, seed, fault=traceback.format_exc()))
            return
        # the models are there, and need not be looked through for garbage each time
        if played < 2 * len(KINDS):
            gc.collect()
            gc.freeze()


def _play_apart(process: int, how: How, *shared: Any) -> None:
    """``play_some`` in a process that is there for nothing else."""
    logging.disable()  # listeners that raise and disks that are full, thousands of them
    keep_to_a_processor(process if how.processes > 1 else None)
    play_some(process, how, *shared)


def keep_to_a_processor(number: int | None) -> None:
    """Have this process's threads share a processor, and not interrupt each other at every operation of a tiny model, which
    MLX hands from one to the other: most of the time went into switching. Where Linux does not allow it, nothing."""
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        mine = sorted(os.sched_getaffinity(0))
        if number is not None and number < len(mine):
            os.sched_setaffinity(0, {mine[number]})


@dataclass
class Played:
    """What several processes have played between them."""

    counts: Counter[str] = field(default_factory=Counter)
    histories: int = 0
    # by process, the seed that it is at
    begun: dict[int, int] = field(default_factory=dict)
    # by process, when it began that
    since: dict[int, float] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)  # by seed

    def take(self, news: News) -> None:
        if news.counts is None and not news.fault:
            self.begun[news.process], self.since[news.process] = (
                news.seed,
                time.monotonic(),
            )
            return
        del self.begun[news.process]
        if news.fault:
            self.faults[news.seed] = news.fault
        else:
            self.counts += news.counts or Counter()
            self.histories += 1


def play_many(steps: int, first: int, how: How) -> Played:
    """Histories from a seed on, in processes of their own, until there are so many operations, or so much time has passed, or
    one has failed. Those that have begun are played to their end, so that no seed is left out."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        seeds = context.Value("q", first)
        ends = context.Event()
        news = context.Queue()
        answers = manager.dict()
        workers = [
            context.Process(
                target=_play_apart,
                args=(number, how, seeds, ends, news, answers),
                daemon=True,
            )
            for number in range(how.processes)
        ]
        for worker in workers:
            worker.start()
        begin, told, played = time.monotonic(), time.monotonic(), Played()
        while any(worker.is_alive() for worker in workers) or not news.empty():
            with contextlib.suppress(queue.Empty):
                played.take(told_of := news.get(timeout=1.0))
                if told_of.fault:
                    tell_fault(told_of.seed, told_of.fault, how)
            for number in [
                number
                for number in played.begun
                if workers[number].exitcode and news.empty()
            ]:
                seed = played.begun.pop(number)
                played.faults[seed] = f"its process ended by {workers[number].exitcode}"
                tell_fault(seed, played.faults[seed], how)
            passed = time.monotonic() - begin
            is_over = how.seconds is not None and passed >= how.seconds
            if played.faults or played.counts["operations"] >= steps or is_over:
                ends.set()
            if time.monotonic() > told + 30:
                told = time.monotonic()
                print(
                    f"{played.counts['operations']:,} operations, {passed:,.0f} s, seeds to {seeds.value}",
                    flush=True,
                )
                for number, seed in played.begun.items():
                    if (long := told - played.since[number]) > 120:
                        print(
                            f"the history of seed {seed} has been played for {long:,.0f} s",
                            flush=True,
                        )
    for number, worker in enumerate(workers):
        if worker.exitcode and number not in played.begun and not played.faults:
            raise RuntimeError(
                f"process {number} ended by {worker.exitcode} before its first history"
            )
    return played


def tell_fault(seed: int, fault: str, how: How) -> None:
    """Say at once which history broke which promise: the others are played to their ends before the run is over."""
    lines = fault.strip().splitlines()
    promise = next(
        (
            line
            for line in reversed(lines)
            if re.match(r"[\w.]+(Error|Injected)\b", line)
        ),
        lines[-1],
    )
    print(
        f"BROKEN, seed {seed} ({KINDS[seed % len(KINDS)]}): {promise}\nagain: {how.again(seed)}",
        flush=True,
    )


# Records ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """What one run has played: every seed from ``first`` to ``last``, each for ``length`` operations."""

    first: int
    last: int
    length: int
    histories: int
    seconds: float
    versions: str
    counts: dict[str, int]
    faults: dict[str, str]  # by seed

    def to_json(self) -> str:
        return json.dumps(vars(self))


def record_of(played: Played, first: int, how: How, seconds: float) -> Record:
    last = first + played.histories + len(played.faults) - 1
    versions = f"mlx {version('mlx')}, Python {platform.python_version()}, {platform.machine()}"
    faults = {str(seed): fault for seed, fault in sorted(played.faults.items())}
    counts = dict(sorted(played.counts.items()))
    return Record(
        first,
        last,
        how.length,
        played.histories,
        round(seconds, 1),
        versions,
        counts,
        faults,
    )


def read_record(path: Path) -> Record:
    """The record of a run's output: its last line. Raises ValueError where there is none, as of a run that was killed."""
    lines = path.read_text(encoding="utf-8").strip().splitlines()
    try:
        return Record(**json.loads(lines[-1]))
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not end with a run's record") from error


def show(records: Sequence[Record]) -> int:
    """Print the sum of some runs, and every failure with the command that plays it again; the exit status.

    Raises ValueError where two runs have played the same seed, or in histories of different lengths, which are no sum.
    """
    records = sorted(records, key=lambda record: record.first)
    for one, other in itertools.pairwise(records):
        if other.first <= one.last:
            raise ValueError(f"seed {other.first} was played twice")
    if len({record.length for record in records}) > 1:
        raise ValueError("histories of different lengths")
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(record.counts)
    ranges = ", ".join(f"{record.first} to {record.last}" for record in records)
    seconds = sum(record.seconds for record in records)
    played = sum(record.histories for record in records)
    versions = "; ".join({record.versions for record in records})
    print(
        f"{counts['operations']:,} operations in {played:,} histories, seeds {ranges}, in {seconds:,.0f} s ({versions}):"
    )
    for name, count in sorted(counts.items()):
        print(f"  {name}: {count:,}")
    faults = {
        int(seed): fault for record in records for seed, fault in record.faults.items()
    }
    for seed, fault in sorted(faults.items()):
        print(
            f"\nthe history of seed {seed} ({KINDS[seed % len(KINDS)]}) broke a promise:\n{fault}"
        )
        print(f"again: {How(records[0].length).again(seed)}")
    print(
        f"{len(faults)} have broken a promise"
        if faults
        else "none has broken a promise"
    )
    return 1 if faults else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.histories", description="Random histories of the engine."
    )
    parser.add_argument(
        "--steps", type=int, default=10_000, help="operations in all, at least"
    )
    parser.add_argument("--seconds", type=float, help="begin no history after so long")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the first history; each has the next one",
    )
    parser.add_argument(
        "--length", type=int, default=120, help="operations of a history"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="that play at a time, each with the next seed",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="compute on the CPU where there is a GPU, too",
    )
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="add up the outputs of runs; play nothing",
    )
    options = parser.parse_args()
    if options.merge:
        sys.exit(show([read_record(path) for path in options.merge]))
    begin = time.monotonic()
    how = How(options.length, options.processes, options.seconds, options.cpu)
    record = record_of(
        play_many(options.steps, options.seed, how),
        options.seed,
        how,
        time.monotonic() - begin,
    )
    status = show([record])
    print(record.to_json())
    sys.exit(status)
