"""The process of one engine: builds the model once, then does what each line of standard input asks, a JSON line each."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import traceback
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np


class Worker:
    """An engine's process between two commands."""

    def __init__(self, engine: str, shape: str, threads: int) -> None:
        # before MLX: it loads the fast BLAS that every engine gets
        from vlm_batch.runtime import blas

        blas.limit_threads(threads)
        import mlx.core as mx

        from benchmarks.compare.engines import ENGINES
        from benchmarks.compare.shapes import SHAPES, build, count_parameters

        self.make = ENGINES[engine]
        self.shape = SHAPES[shape]
        self.model = build(self.shape)
        self.contexts: Any = None
        self.warmed: set[str] = set()  # workloads
        self.ready = {
            "device": str(mx.default_device()),
            "mlx": version("mlx"),
            "parameters": count_parameters(self.model),
            "weights_mb": mx.get_active_memory() / 1e6,
        }

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """One command: {"do": run | warm | reference | rounding | own_share | copied_bytes, "workload": name, "draw": number}.

        ``warm`` with "shapes" has this library compute the shapes that will come. ``reference`` writes and the others read
        "answers", a path; ``rounding`` is for the "steps" of some asks.
        """
        from benchmarks.compare import measure, probe
        from benchmarks.compare.engines import Driven
        from benchmarks.compare.workloads import make_workload

        draw = command.get("draw", 0)
        workload = make_workload(command["workload"], self.shape, draw)
        if command["do"] == "reference":
            return measure.reference(self.model, workload, Path(command["answers"]))
        if command["do"] == "rounding":
            named = {ask.name: ask for ask in workload.asks}
            with np.load(command["answers"]) as answers:
                return {
                    name: measure.rounding(self.model, named[name], answers, step)
                    for name, step in command["steps"].items()
                }
        contexts = self._contexts(workload, draw)
        if command["do"] == "warm":
            asks = [
                replace(ask, max_tokens=min(ask.max_tokens, 6), arrival=0.0)
                for ask in workload.asks[:8]
            ]
            measure.measure(
                self.make, self.model, replace(workload, asks=asks), contexts
            )
            if command.get("shapes") and workload.name not in self.warmed:
                self.warmed.add(workload.name)
                engine = self.make(self.model, workload, contexts)
                if isinstance(engine, Driven):
                    engine.warm_up()
                engine.close()
            return {}
        if command["do"] == "run":
            trace = measure.measure(self.make, self.model, workload, contexts)
            if command["answers"] is None:
                return measure.figures(workload, trace)
            with np.load(command["answers"]) as answers:
                verdict = measure.compare(workload, trace.tokens, answers)
            return {
                **measure.figures(workload, trace),
                "rows": verdict.rows,
                "others": {
                    name: [other.step, _finite(other.gap)]
                    for name, other in verdict.others.items()
                },
            }
        call = {"own_share": probe.own_share, "copied_bytes": probe.copied_bytes}[
            command["do"]
        ]
        return call(self.make, self.model, workload, contexts)

    def _contexts(self, workload: Any, draw: int) -> Any:
        from benchmarks.compare.recall import Contexts

        if not workload.recalled:
            return None
        # all recalled workloads of a draw have the same contexts
        if self.contexts is None or self.contexts[0] != draw:
            self.contexts = draw, Contexts(self.model, workload.asks)
        return self.contexts[1]


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return None if value in (math.inf, -math.inf) or value != value else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "work"), default="wall")
    args = parser.parse_args()
    if args.clock == "work":
        from benchmarks.compare.measure import WorkClock

        WorkClock().install()
    # whatever a library prints must not get between
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(line: dict[str, Any]) -> None:
        finite = {
            name: _finite(value) if isinstance(value, float) else value
            for name, value in line.items()
        }
        answer.write(json.dumps(finite) + "\n")
        answer.flush()

    try:
        worker = Worker(args.engine, args.shape, args.threads)
    except Exception as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say(worker.ready)
    for line in sys.stdin:
        try:
            say(worker.do(json.loads(line)))
        except Exception as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
