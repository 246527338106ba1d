"""This library against the other batchers of vision-language models on MLX, on the same work, with the same answers.

One process for each engine; the engines take turns, round by round. The answers of one-after-another generation are the
measure: a run with other tokens is reported as wrong, not as fast, unless it parts where the model's own precision
cannot tell two tokens apart. Beside the tables come a picture and, as the last
line, JSON.

    python -m benchmarks.compare                                   a CPU, 47 M parameters, float32
    python -m benchmarks.compare --shape 3b                        a GPU, the sizes of Qwen2.5-VL-3B, bfloat16
    python -m benchmarks.compare --shape gemma3-4b --seconds 540   of another family; begins nothing that would end later
    python -m benchmarks.compare --rounds 5 --draws 5              other arrivals, lengths and pictures each round
    python -m benchmarks.compare --vllm-python PATH/bin/python     with vllm-mlx, from an environment of its own
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.compare import measure, report
from benchmarks.compare.engines import ENGINES, WANTED
from benchmarks.compare.shapes import OTHERS_WORKLOADS, SHAPES
from benchmarks.compare.workloads import WORKLOADS, make_workload

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "one after another"
OURS = report.OURS


class Remote:
    """An engine's process, asked a line at a time."""

    def __init__(
        self, engine: str, python: str, args: argparse.Namespace, log: Path
    ) -> None:
        self.log = log
        environment = {
            **os.environ,
            "OPENBLAS_NUM_THREADS": str(args.threads),
            "PYTHONPATH": _python_path(),
        }
        if (
            engine not in (OURS, report.OURS_DEFAULTS, report.REPRODUCIBLE)
            and args.launches == "own"
        ):
            for name in ("MLX_USE_CUDA_GRAPHS", "MLX_ENABLE_TF32"):
                # what MLX does where nothing asks otherwise
                environment.setdefault(name, "1")
        command = [python, "-m", "benchmarks.compare.worker", "--engine", engine]
        command += [
            "--shape",
            args.shape,
            "--clock",
            args.clock,
            "--threads",
            str(args.threads),
        ]
        self.errors = log.open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.ready: dict[str, Any] = {}

    def wait(self) -> dict[str, Any]:
        """What the process says of itself once its model is there; it may take a minute."""
        self.ready = self._answer()
        return self.ready

    def ask(self, **command: Any) -> dict[str, Any]:
        """What the process answers, or {"error": why} once it cannot."""
        if "error" in self.ready:
            return self.ready
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return self._ended()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            # still at work on a run that nobody waits for
            self.process.kill()
        with self.process, self.errors:
            pass

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else self._ended()

    def _ended(self) -> dict[str, Any]:
        status = self.process.wait(timeout=60)
        lines = (
            self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        )
        self.ready = {
            "error": f"its process ended with {status}: {lines[-1] if lines else 'no word'}"
        }
        return self.ready


def _python_path() -> str:
    """The checkout first, so that an engine's process finds this library's source, installed or not."""
    known = os.environ.get("PYTHONPATH")
    return f"{ROOT}{os.pathsep}{known}" if known else str(ROOT)


class Remotes:
    """The engines' processes. ``apart``: one at a time, because a process keeps device memory that it does not use."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.apart = False
        self._args = args
        self._folder = folder
        self._running: dict[str, Remote] = {}

    def __contains__(self, engine: str) -> bool:
        return engine != "vllm-mlx" or self._args.vllm_python is not None

    def start(self, engine: str) -> Remote:
        """The engine's process, with its model; a new one where they run apart and it was another's turn."""
        if engine not in self._running:
            if self.apart:
                self.close()
            python = self._args.vllm_python if engine == "vllm-mlx" else sys.executable
            self._running[engine] = Remote(
                engine, python, self._args, self._folder / f"{engine}.log"
            )
            self._running[engine].wait()
        return self._running[engine]

    def close(self) -> None:
        """End them all."""
        for remote in self._running.values():
            remote.close()
        self._running.clear()


class Comparison:
    """The rounds of every workload, and what is known of them so far."""

    def __init__(
        self, args: argparse.Namespace, console: Console, folder: Path
    ) -> None:
        self.args = args
        self.shape = SHAPES[args.shape]
        self.remotes = Remotes(args, folder)
        self.wanted = {
            name: [engine for engine in WANTED[name] if engine in args.engines]
            for name in args.workloads
        }
        self.found: report.Found = {
            name: {engine: [] for engine in [*engines, REFERENCE]}
            for name, engines in self.wanted.items()
        }
        self.began = time.perf_counter()
        self.ready: dict[str, Any] = {}  # of the first engine
        self._console = console
        self._folder = folder
        self._answers: dict[tuple[str, int], Path] = {}  # of a workload in a draw
        self._roundings: dict[tuple[str, int, str, int], float] = {}

    def start(self) -> None:
        """Hear from the first process of the device and the model. Raises SystemExit if it cannot run."""
        engine = next(iter(self._engines())) if self.args.unchecked else REFERENCE
        ready = self.remotes.start(engine).ready
        if "error" in ready:
            raise SystemExit(f"{engine} cannot run: {ready['error']}")
        apart = self.args.apart
        self.remotes.apart = (
            "gpu" in ready["device"] and not self.args.unchecked
            if apart is None
            else apart
        )
        self.ready = ready

    def run(self) -> None:
        """All rounds, for as long as there is time. A round takes the next draw of its workload."""
        taken: dict[str, float] = {}  # seconds of each workload's last round
        for number in range(self.args.rounds):
            for name in self.wanted:
                start = time.perf_counter()
                if (
                    self.args.seconds is not None
                    and start - self.began + taken.get(name, 0.0) > self.args.seconds
                ):
                    self._say(name, f"round {number + 1}: left out, time is up")
                    continue
                self._round(name, number)
                taken[name] = time.perf_counter() - start

    def _engines(self) -> list[str]:
        wanted = dict.fromkeys(
            engine for engines in self.wanted.values() for engine in engines
        )
        return [engine for engine in wanted if engine in self.remotes]

    def _warm(self, remote: Any, name: str) -> None:
        """Kernels are built and chosen with their first use."""
        remote.ask(do="warm", workload=name, shapes=self.args.warm_up)

    def probes(self) -> dict[str, dict[str, Any]]:
        """The engines' own share of a step, and what a join and a leave copy."""
        engines = [
            engine
            for engine in (OURS, "mlx-vlm best")
            if any(engine in names for names in self.wanted.values())
        ]
        return {
            engine: _probe(self.remotes.start(engine), list(self.wanted))
            for engine in engines
        }

    def _round(self, name: str, number: int) -> None:
        draw = self.args.seed + number % self.args.draws
        workload = make_workload(name, self.shape, draw)
        source = workload.answers_of or name
        if not self.args.unchecked and (source, draw) not in self._answers:
            result = self._answer_alone(source, draw)
            if (
                source == name
                and REFERENCE not in self.wanted[name]
                and not workload.recalled
            ):
                self.found[name][REFERENCE].append(result)
        answers = None if self.args.unchecked else str(self._answers[source, draw])
        order = [engine for engine in self.wanted[name] if engine in self.remotes]
        results: dict[str, dict[str, Any]] = {}
        for engine in order if number % 2 == 0 else order[::-1]:
            remote = self.remotes.start(engine)
            if (
                self.remotes.apart
                or self.args.warm_up
                or (number == 0 and "gpu" in str(remote.ready.get("device")))
            ):
                self._warm(remote, name)
            results[engine] = remote.ask(
                do="run", workload=name, draw=draw, answers=answers
            )
        for engine, result in results.items():
            if answers is not None:
                self._judge(result, name, draw)
            elif "error" not in result:
                result |= {
                    "answers": "not compared",
                    "rows_that_differ": None,
                    "worst_gap": None,
                }
            self.found[name][engine].append(result)
            self._say(name, f"round {number + 1}, {engine}: {_outcome(result)}")
        self._keep()

    def _answer_alone(self, source: str, draw: int) -> dict[str, Any]:
        """Have the answers one after another stored for the engines' processes; that run's figures are a row in the tables."""
        path = self._folder / f"{source}-{draw}.npz"
        result = self.remotes.start(REFERENCE).ask(
            do="reference", workload=source, draw=draw, answers=str(path)
        )
        if "error" in result:
            raise SystemExit(f"the reference failed on {source}: {result['error']}")
        self._answers[source, draw] = path
        self._say(source, f"the answers, {REFERENCE}: {_outcome(result)}")
        return result

    def _judge(self, result: dict[str, Any], name: str, draw: int) -> None:
        """Say of a run whether its answers are right: the same, or other from a near-tie on."""
        if "error" in result:
            return
        others = {
            ask: measure.Other(step, math.inf if gap is None else gap)
            for ask, (step, gap) in result.pop("others").items()
        }
        verdict = measure.Verdict(result.pop("rows"), others)
        limits = self._limits(verdict, name, draw)
        result["right"] = verdict.is_right(limits)
        result["answers"] = verdict.describe(limits)
        result["rows_that_differ"] = len(others)
        result["worst_gap"] = max(verdict.gaps.values(), default=0.0)

    def _limits(
        self, verdict: measure.Verdict, name: str, draw: int
    ) -> dict[str, float]:
        """The widest gap of a near-tie for each row that differs: two runs err, each by the precision's rounding there."""
        if self.shape.near_tie is not None:
            return dict.fromkeys(verdict.others, self.shape.near_tie)
        source = make_workload(name, self.shape, draw).answers_of or name
        steps = {
            ask: other.step
            for ask, other in verdict.others.items()
            if math.isfinite(other.gap)
        }
        missing = {
            ask: step
            for ask, step in steps.items()
            if (source, draw, ask, step) not in self._roundings
        }
        if missing:
            said = self.remotes.start(REFERENCE).ask(
                do="rounding",
                workload=name,
                draw=draw,
                answers=str(self._answers[source, draw]),
                steps=missing,
            )
            if "error" in said:
                raise SystemExit(f"the reference failed in float32: {said['error']}")
            self._roundings |= {
                (source, draw, ask, missing[ask]): value for ask, value in said.items()
            }
        return {
            ask: 2 * self._roundings[source, draw, ask, step]
            for ask, step in steps.items()
        }

    @property
    def is_gpu(self) -> bool:
        return "gpu" in self.ready["device"]

    def result(self, probes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What the JSON line says, of all that is known by now."""
        args, ready, found = self.args, self.ready, self.found
        titles = {
            name: make_workload(name, self.shape, args.seed).title for name in found
        }
        ours = [one for one in (OURS, report.OURS_DEFAULTS) if one in args.engines]
        return {
            "shape": args.shape,
            "parameters": ready["parameters"],
            "device": ready["device"],
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
            "versions": {
                "mlx": ready["mlx"],
                "mlx_vlm": version("mlx-vlm"),
                "python": platform.python_version(),
            },
            "clock": args.clock,
            "launches": args.launches,
            "warm_up": args.warm_up,
            "rounds": args.rounds,
            "draws": [args.seed + number for number in range(args.draws)],
            "apart": self.remotes.apart,
            "seconds": round(time.perf_counter() - self.began, 1),
            "workloads": {
                name: {"title": titles[name], "engines": engines}
                for name, engines in found.items()
            },
            "ratios": [
                {
                    "workload": w,
                    "ours": one,
                    "against": e,
                    "figure": f,
                    "target": t,
                    **report.spread(ratios),
                }
                for w, e, f, t in report.targets(self.is_gpu, args.shape)
                for one in ours
                if (ratios := report.ratios(found, w, e, f, ours=one))
            ],
            "probes": dict(probes or {}),
        }

    def _keep(self) -> None:
        """Write down what is known by now: the process may be ended before the last round."""
        if self.args.out is not None:
            keep(self.args.out, self.result())

    def _say(self, workload: str, words: str) -> None:
        seconds = time.perf_counter() - self.began
        self._console.print(
            f"[{seconds:4.0f} s] {workload}, {words}", highlight=False, markup=False
        )


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The whole comparison; what the JSON line says."""
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(args, console, Path(folder))
        try:
            comparison.start()
            comparison.run()
            probes = comparison.probes() if args.probes else {}
        finally:
            comparison.remotes.close()
    result = comparison.result(probes)
    titles = {name: entry["title"] for name, entry in result["workloads"].items()}
    report.show(
        console, titles, comparison.found, report.targets(comparison.is_gpu, args.shape)
    )
    if probes:
        report.show_probes(console, probes)
    return result


def keep(folder: Path, result: Mapping[str, Any]) -> None:
    """Write compare.json, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / "compare.json.part"
    written.write_text(json.dumps(result), encoding="utf-8")
    written.replace(folder / "compare.json")


def _probe(remote: Remote, workloads: Sequence[str]) -> dict[str, Any]:
    found = remote.ask(do="own_share", workload="steady")
    if "churn-8" in workloads:
        found |= remote.ask(do="copied_bytes", workload="churn-8")
    return found


def _outcome(result: Mapping[str, Any]) -> str:
    return (
        result.get("error")
        or f"{result['seconds']:.2f} s, {result.get('answers', 'recorded')}"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [name for name in WANTED if name in WORKLOADS]
    parser.add_argument(
        "--shape",
        choices=list(SHAPES),
        default="small",
        help="the model (default: small)",
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=list(ENGINES),
        default=list(ENGINES),
        metavar="NAME",
        help=", ".join(ENGINES),
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="timed rounds, of which the median counts (default: 2, or one a draw)",
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=1,
        help="draws of the workloads that the rounds take turns with",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="the first draw's number: 0 is what the engines were tuned on",
    )
    parser.add_argument(
        "--apart",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="one engine's process at a time (default: on a GPU, unless unchecked: a process keeps memory that it has freed)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="begin no workload's round that would end after this; --out has what is known by then",
    )
    parser.add_argument(
        "--vllm-python",
        help="the interpreter of an environment with vllm-mlx; without it, left out",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, (os.cpu_count() or 1) // 2),
        help="of the BLAS on a CPU",
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "work"),
        default="wall",
        help="work: count each engine's CPU time instead of wall time, for a CPU that is busy with other things",
    )
    parser.add_argument(
        "--launches",
        choices=("own", "ours"),
        default="own",
        help="ours: the other engines launch their CUDA work as this library does, too (vlm_batch.runtime.launches)",
    )
    parser.add_argument(
        "--warm-up",
        action="store_true",
        help="have this library compute the shapes that will come before the rounds, as its server does while nothing is asked",
    )
    parser.add_argument(
        "--unchecked",
        action="store_true",
        help="times alone: no answers one after another, which take longest, to compare with",
    )
    parser.add_argument(
        "--probes",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="own work, copied bytes",
    )
    parser.add_argument(
        "--out", type=Path, help="a folder for compare.json and compare.png"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the tables in Markdown, too"
    )
    parser.add_argument(
        "--reproducible",
        action="store_true",
        help="the cost of reproducible answers: this library with and without, and nobody else",
    )
    args = parser.parse_args(arguments)
    args.rounds = args.rounds or max(2, args.draws)
    shape = SHAPES[args.shape]
    args.workloads = args.workloads or (
        names if shape.family == "qwen2_5_vl" else list(OTHERS_WORKLOADS)
    )
    args.unchecked = args.unchecked or bool(shape.unchecked)
    if args.reproducible:
        args.engines = [OURS, report.REPRODUCIBLE]
        args.workloads = [
            name for name in args.workloads if report.REPRODUCIBLE in WANTED[name]
        ]
    return args


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 170)
    result = run(args, console)
    if args.out is not None:
        keep(args.out, result)
        found = {name: entry["engines"] for name, entry in result["workloads"].items()}
        titles = {name: entry["title"] for name, entry in result["workloads"].items()}
        if not report.draw(args.out / "compare.png", titles, found):
            console.print(
                "no picture: matplotlib is not installed (pip install 'vlm-batch[bench]')",
                markup=False,
            )
    if args.markdown:
        print(report.markdown(*report.merged([result])))
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
