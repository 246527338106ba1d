"""What an answer costs beside the arithmetic, for every family: python -m benchmarks.families [--help]

Each family has a tiny model of mlx-vlm's classes (``tests.zoo``), where launches and Python decide. 24 requests of 40 tokens,
two thirds of them with a picture, over 8 rows, three ways in turns: this library's public batcher (``inputs=``, nothing is
kept), mlx-vlm's ``BatchGenerator`` with as many rows and prompts together, and ``generate_step`` one after another. The batches
run once to warm up, and the median of the turns counts; one after another, which takes longest, runs once. Then, for the first
two, one decode step of all rows: the operations that it launches, and the engine thread's computing (not: waiting), with the
engine's own part of it, which is neither the model's nor MLX's.

A process serves one family after another, and another takes its place where one ends it or takes too long: such a family is a
line of the table. With ``--json`` each family is written when it is done; ``--table FILE`` makes a table of such a file.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from benchmarks.compare.workloads import Ask, Workload

ROWS = 8
REQUESTS = 24
TOKENS = 40
#: The ways, by what they are called in the table.
OURS, THEIRS, ALONE = "vlm_batch", "mlx-vlm", "alone"
#: Operations that lay an array out otherwise and compute nothing; slices are counted, since some are copied.
FREE = frozenset(
    {
        "Broadcast",
        "BroadcastAxes",
        "ExpandDims",
        "Squeeze",
        "Reshape",
        "Flatten",
        "Unflatten",
        "Transpose",
        "AsStrided",
    }
)
#: The calls of an adapter that are the model's.
MODEL_CALLS = (
    "encode",
    "encode_together",
    "prefill",
    "finish_prefill",
    "decode",
    "make_cache",
)


# One family, in the worker's process ------------------------------------------------------------------------------------


def workload_of(tiny: Any, requests: int, tokens: int, rows: int = ROWS) -> Workload:
    """Every third request is a text of 5 to 27 tokens; the others have a picture of one of three sizes."""
    made = [
        tiny.text(100 + n, 5 + n) if n % 3 == 2 else tiny.image(100 + n, n // 3 % 3)
        for n in range(requests)
    ]
    return Workload(
        tiny.name,
        tiny.name,
        [Ask(str(n), inputs, tokens) for n, inputs in enumerate(made)],
        rows,
    )


def through_batcher(batcher: Any, workload: Workload) -> list[list[int]]:
    """All requests through the public batcher at once; their tokens. Raises the first one's error."""
    from vlm_batch import Request, SamplingParams

    handles = [
        batcher.submit_request(
            Request(
                inputs=ask.inputs,
                params=SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True),
            )
        )
        for ask in workload.asks
    ]
    results = [handle.result() for handle in handles]
    for result in results:
        if result.error is not None:
            raise RuntimeError(result.error) from result.exception
    return [list(result.token_ids) for result in results]


def through_engine(make: Callable[[], Any], workload: Workload) -> list[list[int]]:
    """All requests through an engine of ``benchmarks.compare``."""
    from benchmarks.compare.measure import Trace, drive

    trace, engine = Trace(), make()
    try:
        drive(engine, workload, trace)
    finally:
        engine.close()
    return [trace.tokens[ask.name] for ask in workload.asks]


def measure(
    name: str, turns: int, requests: int, tokens: int
) -> Iterator[dict[str, Any]]:
    """A family's figures, a part at a time: seconds of each way, then what a step takes."""
    from benchmarks.compare.engines import (
        MlxVlm,
        OneAfterAnother,
        Processor,
        ThisLibrary,
    )
    from benchmarks.compare.measure import forget
    from tests.zoo import family
    from vlm_batch import VLMBatcher

    class Speaking(Processor):
        def decode(self, tokens: Sequence[int], **kwargs: Any) -> str:
            return "".join(chr(ord("a") + token % 26) for token in tokens)

    tiny = family(name)
    model: Any = tiny.build()
    workload = workload_of(tiny, requests, tokens)
    # turns repeat
    with VLMBatcher(
        model, Speaking(), max_rows=ROWS, caches=None, policy={"draft": "off"}
    ) as batcher:
        makers: dict[str, Callable[[], Any]] = {
            THEIRS: lambda: MlxVlm(
                model, workload, prefill_rows=ROWS, rows=ROWS, step_size=2048
            ),
            ALONE: lambda: OneAfterAnother(model, workload),
        }
        ways: dict[str, Callable[[], list[list[int]]]] = {
            OURS: lambda: through_batcher(batcher, workload)
        }
        ways |= {
            way: lambda make=make: through_engine(make, workload)  # type: ignore[misc]
            for way, make in makers.items()
        }
        wrong: dict[str, str] = {}
        answers: dict[str, list[list[int]]] = {}
        seconds: dict[str, dict[str, list[float]]] = {
            way: {"wall": [], "cpu": []} for way in ways
        }
        for turn in range(turns + 1):
            for way, run in ways.items():
                if way in wrong or (way == ALONE and turn != 1):
                    continue
                forget(model)
                wall, cpu = time.perf_counter(), time.process_time()
                try:
                    answers[way] = run()
                except Exception as error:
                    wrong[way] = _line(error)
                    continue
                if turn:  # the first warms up
                    seconds[way]["wall"].append(time.perf_counter() - wall)
                    seconds[way]["cpu"].append(time.process_time() - cpu)
    same = {
        way: sum(one == other for one, other in zip(found, answers[ALONE], strict=True))
        for way, found in answers.items()
        if ALONE in answers
    }
    yield {
        "seconds": {way: found for way, found in seconds.items() if way not in wrong},
        "same": same,
        "wrong": wrong,
    }
    few = workload_of(tiny, ROWS, tokens)
    engines = {OURS: lambda: ThisLibrary(model, few), THEIRS: makers[THEIRS]}
    steps: dict[str, Any] = {}
    for way, make in engines.items():
        if way not in wrong:
            forget(model)
            try:
                steps[way] = step_costs(make(), few)
            except Exception as error:
                steps[way] = {"wrong": _line(error)}
    yield {"steps": steps}


def step_costs(engine: Any, workload: Workload) -> dict[str, Any]:
    """Of decode steps of all rows, by median: milliseconds in all, of the thread's computing, of its own part, and of waiting
    or other threads' work; and the operations that one of them launches."""
    import mlx.core as mx

    from benchmarks.compare.probe import Clock, Watched, watched

    clock, taken = Clock(), list[tuple[float, float, float, float]]()
    models: Any = nullcontext()
    generator = engine.generator
    if hasattr(generator, "adapter"):
        models = watched(generator.adapter, clock, MODEL_CALLS)
    else:
        generator.model = Watched(generator.model, clock)
    plain = {
        name: getattr(mx, name)
        for name in ("eval", "async_eval", "clear_cache", "compile")
    }
    watching = {name: clock.wrap(call) for name, call in plain.items()}
    # A step that is a graph is the model's.
    watching["compile"] = lambda function, **how: clock.wrap(
        plain["compile"](function, **how)
    )
    operations: list[Counter[str]] = []
    for ask in workload.asks:
        engine.add(ask)
    try:
        for name, call in watching.items():
            setattr(mx, name, call)
        with models:
            full = 0
            while (full or not taken) and full < workload.asks[0].max_tokens - 4:
                begin = (
                    time.perf_counter(),
                    time.thread_time(),
                    time.process_time(),
                    clock.seconds,
                )
                if full and full % 8 == 0:
                    with _counted() as counts:
                        came = len(engine.step())
                    operations.append(counts)
                else:
                    came = len(engine.step())
                    wall, thread, process, model = (
                        now - then
                        for now, then in zip(
                            (
                                time.perf_counter(),
                                time.thread_time(),
                                time.process_time(),
                                clock.seconds,
                            ),
                            begin,
                            strict=True,
                        )
                    )
                    if came == workload.rows and full > 2:
                        taken.append((wall, thread, thread - model, process - thread))
                if came == workload.rows:
                    full += 1
                elif full:
                    break
    finally:
        for name, call in plain.items():
            setattr(mx, name, call)
        engine.close()
    if not taken:
        raise RuntimeError("its rows never decode together")
    wall, thread, own, others = (
        1000 * statistics.median(column) for column in zip(*taken, strict=True)
    )
    counts = (
        min(operations, key=lambda one: sum(one.values()))
        if operations
        else Counter[str]()
    )
    return {
        "step_ms": wall,
        "thread_ms": thread,
        "own_ms": own,
        "other_threads_ms": others,
        "waits_ms": max(0.0, wall - thread),
        "operations": sum(count for kind, count in counts.items() if kind not in FREE),
        "by_kind": dict(counts.most_common()),
    }


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Count the operations of everything that is evaluated meanwhile, by kind."""
    import mlx.core as mx

    counts: Counter[str] = Counter()
    before = {name: getattr(mx, name) for name in ("eval", "async_eval")}

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arrays: Any) -> Any:
            dot, flat = io.StringIO(), _arrays(arrays)
            if flat:
                mx.export_to_dot(dot, *flat)
                counts.update(
                    re.findall(r'label ="(\w+)[^"]*", shape=rectangle', dot.getvalue())
                )
            return call(*arrays)

        return count

    try:
        for name, call in before.items():
            setattr(mx, name, counting(call))
        yield counts
    finally:
        for name, call in before.items():
            setattr(mx, name, call)


def _arrays(tree: Any) -> list[Any]:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    leaves: Any = tree_flatten(tree)
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"


def work(names: Sequence[str], turns: int, requests: int, tokens: int) -> None:
    """Measure families one after another; a JSON line on standard output for each part, and for each end."""
    # whatever a library prints must not get between
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(line: Mapping[str, Any]) -> None:
        answer.write(json.dumps(line) + "\n")
        answer.flush()

    # before MLX: it loads the fast BLAS that every engine gets
    from vlm_batch.runtime import blas

    blas.limit_threads(1)
    from importlib.metadata import version

    import mlx.core as mx

    facts = {
        "mlx": version("mlx"),
        "mlx-vlm": version("mlx-vlm"),
        "Python": platform.python_version(),
    }
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"
    say({"machine": machine, "device": str(mx.default_device()), **facts})
    for name in names:
        say({"begins": name})
        try:
            for part in measure(name, turns, requests, tokens):
                say({"family": name, **part})
        except Exception as error:
            say({"family": name, "error": _line(error)})
        say({"ends": name})


# All families, in the process that waits ----------------------------------------------------------------------------------


class Workers:
    """A worker's process at a time, which measures the families that are left."""

    def __init__(self, options: Sequence[str]) -> None:
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        self._lines: Queue[str | None] = Queue()

    def line(self, names: Sequence[str], until: float) -> dict[str, Any] | None:
        """The next line; None where the worker has ended. Raises TimeoutError if none has come in time."""
        if self._process is None:
            command = [
                sys.executable,
                "-m",
                "benchmarks.families",
                "--work",
                "--families",
                *names,
                *self._options,
            ]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self._lines = Queue()
            threading.Thread(
                target=self._read, args=(self._process, self._lines), daemon=True
            ).start()
        try:
            text = self._lines.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            raise TimeoutError from None
        return None if text is None else json.loads(text)

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: Queue[str | None]) -> None:
        assert process.stdout is not None
        for text in process.stdout:
            lines.put(text)
        lines.put(None)

    def end(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def measure_all(
    names: Sequence[str],
    options: Sequence[str],
    limit: float,
    budget: float,
    clock: str,
    write: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """Measure families, and have what is known written after each; a family that ends its process or takes longer than
    ``limit`` seconds has an error, and so have those that are left when ``budget`` seconds are over."""
    found: dict[str, Any] = {"clock": clock, "facts": {}, "families": {}}
    left, last = list(names), time.monotonic() + budget
    workers, until = Workers(options), min(last, time.monotonic() + limit)
    while left:
        families = found["families"]
        try:
            line = workers.line(left, until)
            error = "its process ended" if line is None else None
        except TimeoutError:
            line = None
            error = (
                "no time is left"
                if time.monotonic() >= last
                else f"took longer than {limit:.0f} s"
            )
        if line is None:
            workers.end()
            families.setdefault(left[0], {})["error"] = error
            left.pop(0)
            if time.monotonic() >= last:
                for name in left:
                    families[name] = {"error": "no time was left"}
                left = []
            until = min(last, time.monotonic() + limit)
            write(found)
        elif "begins" in line:
            until = min(last, time.monotonic() + limit)
        elif "ends" in line:
            name = line["ends"]
            left.remove(name)
            lines = [
                row_of(name, families[name], clock),
                *ended({name: families[name]}),
            ]
            print("\n".join(lines), flush=True)
            write(found)
        elif "family" in line:
            families.setdefault(line.pop("family"), {}).update(line)
        else:
            found["facts"] = line
    workers.end()
    return found


# The table ------------------------------------------------------------------------------------------------------------------

HEAD = (
    "| family | over mlx-vlm | as alone | over one after another | seconds | own (ms) |\n"
    "|---|---|---|---|---|---|"
)
#: Most characters of an error on the page.
SHOWN_CHARACTERS = 64


def ratio_over(way: str, one: Mapping[str, Any], clock: str) -> float | None:
    """Our time over another way's, the median of the turns; None where one of them ended."""
    ours, theirs = (
        one.get("seconds", {}).get(which, {}).get(clock) for which in (OURS, way)
    )
    if not ours or not theirs:
        return None
    if len(ours) != len(theirs):  # one after another runs once
        return statistics.median(ours) / statistics.median(theirs)
    return statistics.median(
        mine / other for mine, other in zip(ours, theirs, strict=True)
    )


def row_of(name: str, one: Mapping[str, Any], clock: str) -> str:
    """A family's line. "As alone": the requests that mlx-vlm's batch answers as mlx-vlm does one after another."""
    same, steps = one.get("same", {}), one.get("steps", {})
    seconds = one.get("seconds", {}).get(OURS, {}).get(clock)

    def ratio(way: str) -> str:
        found = ratio_over(way, one, clock)
        return "" if found is None else f"{found:.2f}"

    right = f"{same[THEIRS]}/{same[ALONE]}" if {THEIRS, ALONE} <= same.keys() else ""
    own = steps.get(OURS, {}).get("own_ms")
    cells = [
        ratio(THEIRS),
        right,
        ratio(ALONE),
        f"{statistics.median(seconds):.3f}" if seconds else "",
        "" if own is None else f"{own:.2f}",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def ended(*runs: Mapping[str, Any]) -> list[str]:
    """A line for each error that ended a way, with the families that it ended in these runs."""
    names: dict[str, dict[str, None]] = {}
    for families in runs:
        for name, one in sorted(families.items()):
            wrong = one.get("wrong", {})
            error = wrong.get(OURS) or wrong.get(THEIRS) or one.get("error", "")
            if error:
                names.setdefault(_short(error), {})[name] = None
    return [f"- {error}: {', '.join(of)}" for error, of in names.items()]


def _short(error: str) -> str:
    shown = error.replace("|", "/")
    return textwrap.shorten(shown, SHOWN_CHARACTERS, placeholder=" ...")


def summary(families: Mapping[str, Any], clock: str) -> str:
    """The ratios of all families that have both, and of those whose batch mlx-vlm answers as alone, in a line."""
    lines = []

    def add(way: str, of: str, chosen: Iterable[Mapping[str, Any]]) -> None:
        ratios = [
            ratio
            for one in chosen
            if (ratio := ratio_over(way, one, clock)) is not None
        ]
        if ratios:
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            lines.append(
                f"over {way}{of}: median {middle:.2f}, {low:.2f} to {high:.2f} ({len(ratios)} families)"
            )

    add(THEIRS, "", families.values())
    right = [
        one
        for one in families.values()
        if {THEIRS, ALONE} <= one.get("same", {}).keys()
    ]
    add(
        THEIRS,
        " where it answers as alone",
        [one for one in right if one["same"][THEIRS] == one["same"][ALONE]],
    )
    add(ALONE, "", families.values())
    owns = [
        one["steps"][OURS]["own_ms"]
        for one in families.values()
        if "own_ms" in one.get("steps", {}).get(OURS, {})
    ]
    if owns:
        lines.append(
            f"own Python of a step: median {statistics.median(owns):.2f} ms, most {max(owns):.2f} ({len(owns)} families)"
        )
    return "; ".join(lines)


def table(found: Mapping[str, Any], clock: str) -> str:
    families = found["families"]
    rows = [row_of(name, one, clock) for name, one in sorted(families.items())]
    return "\n".join([HEAD, *rows, "", _sentence(summary(families, clock))])


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--families",
        nargs="+",
        help="names of tests.zoo (default: all that have a family of their own)",
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=3,
        help="timed runs of each way, whose median counts",
    )
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor seconds, for a machine that others use",
    )
    parser.add_argument(
        "--limit", type=float, default=120, help="seconds of a family (default: 120)"
    )
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="seconds of all families"
    )
    parser.add_argument(
        "--json", type=Path, help="where the figures are written, family by family"
    )
    parser.add_argument(
        "--table", type=Path, help="print the table of such a file, and measure nothing"
    )
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text(encoding="utf-8")), args.clock))
        return
    if args.work:
        work(args.families, args.turns, args.requests, args.tokens)
        return
    options = [
        f"--turns={args.turns}",
        f"--requests={args.requests}",
        f"--tokens={args.tokens}",
    ]

    def write(found: Mapping[str, Any]) -> None:
        if args.json:
            args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")

    found = measure_all(
        args.families or all_families(),
        options,
        args.limit,
        args.budget,
        args.clock,
        write,
    )
    lines = [table(found, args.clock), *ended(found["families"])]
    print("\n" + "\n".join([*lines, json.dumps(found["facts"])]))


def all_families() -> list[str]:
    """Names of tests.zoo, without variants of a family."""
    from tests.zoo import FAMILIES

    return sorted(name for name, tiny in FAMILIES.items() if not tiny.variant_of)


if __name__ == "__main__":
    main()
