"""This library against the other batchers of vision-language models on MLX, on the same work, with the same answers.

One process for each engine; the engines take turns, round by round. The answers of one-after-another generation are the
measure: a run with other tokens is reported as wrong, not as fast. Beside the tables come a picture and, as the last
line, JSON.

    python -m benchmarks.compare                                   a CPU, 47 M parameters, float32
    python -m benchmarks.compare --shape 3b                        a GPU, the sizes of Qwen2.5-VL-3B, bfloat16
    python -m benchmarks.compare --vllm-python PATH/bin/python     with vllm-mlx, from an environment of its own
"""

from __future__ import annotations

import argparse
import json
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

from benchmarks.compare import report
from benchmarks.compare.engines import ENGINES, WANTED
from benchmarks.compare.shapes import SHAPES
from benchmarks.compare.workloads import WORKLOADS, make_workload

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "one after another"
OURS = "vlm_batch"


class Remote:
    """An engine's process, asked a line at a time."""

    def __init__(self, engine: str, python: str, args: argparse.Namespace, log: Path) -> None:
        self.log = log
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": str(args.threads), "PYTHONPATH": _python_path()}
        if engine != OURS and args.launches == "own":
            environment.setdefault("MLX_USE_CUDA_GRAPHS", "1")  # what MLX does where nothing asks otherwise
        command = [python, "-m", "benchmarks.compare.worker", "--engine", engine]
        command += ["--shape", args.shape, "--clock", args.clock, "--threads", str(args.threads)]
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
        except subprocess.TimeoutExpired:  # still at work on a run that nobody waits for
            self.process.kill()
        with self.process, self.errors:
            pass

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else self._ended()

    def _ended(self) -> dict[str, Any]:
        status = self.process.wait(timeout=60)
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        self.ready = {"error": f"its process ended with {status}: {lines[-1] if lines else 'no word'}"}
        return self.ready


def _python_path() -> str:
    """The checkout first, so that an engine's process finds this library's source, installed or not."""
    known = os.environ.get("PYTHONPATH")
    return f"{ROOT}{os.pathsep}{known}" if known else str(ROOT)


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The whole comparison; what the JSON line says."""
    began = time.perf_counter()
    shape = SHAPES[args.shape]
    workloads = {name: make_workload(name, shape) for name in args.workloads}
    wanted = {name: [engine for engine in WANTED[name] if engine in args.engines] for name in workloads}
    needed = {engine for engines in wanted.values() for engine in engines} | {REFERENCE}
    found: report.Found = {name: {engine: [] for engine in [*engines, REFERENCE]} for name, engines in wanted.items()}
    with tempfile.TemporaryDirectory() as folder:
        remotes: dict[str, Remote] = {}
        try:
            for engine in (name for name in ENGINES if name in needed):
                python = args.vllm_python if engine == "vllm-mlx" else sys.executable
                if python is None:
                    continue
                remotes[engine] = Remote(engine, python, args, Path(folder, f"{engine}.log"))
            for engine, remote in remotes.items():
                said = remote.wait().get("error", "ready")
                console.print(f"{_clock(began)} {engine}: {said}", highlight=False, markup=False)
            ready = remotes[REFERENCE].ready
            if "error" in ready:
                raise SystemExit(f"the reference cannot run: {ready['error']}")
            is_gpu = "gpu" in ready["device"]
            answers: dict[str, Path] = {}
            taken: dict[str, float] = {}  # seconds of each workload's last round
            for number in range(args.rounds):
                for name, workload in workloads.items():
                    start = time.perf_counter()
                    if args.seconds is not None and start - began + taken.get(name, 0.0) > args.seconds:
                        console.print(f"{_clock(began)} {name}, round {number + 1}: left out, time is up", markup=False)
                        continue
                    source = workload.answers_of or name
                    if source not in answers:
                        answers[source] = Path(folder, f"{source}.npz")
                        result = _answer_alone(remotes[REFERENCE], source, answers[source])
                        _say(console, began, source, "the answers", REFERENCE, result)
                        if source == name and REFERENCE not in wanted[name] and not workload.recalled:
                            found[name][REFERENCE] = [result]
                        start = time.perf_counter()
                    order = [engine for engine in wanted[name] if engine in remotes]
                    for engine in order if number % 2 == 0 else order[::-1]:
                        remote = remotes[engine]
                        if number == 0 and is_gpu:  # kernels are built and chosen with their first use
                            remote.ask(do="warm", workload=name)
                        result = remote.ask(do="run", workload=name, answers=str(answers[source]))
                        found[name][engine].append(result)
                        _say(console, began, name, f"round {number + 1}", engine, result)
                    taken[name] = time.perf_counter() - start
            probes: dict[str, dict[str, Any]] = {
                engine: _probe(remotes[engine], list(workloads))
                for engine in (OURS, "mlx-vlm best")
                if engine in remotes and args.probes
            }
        finally:
            for remote in remotes.values():
                remote.close()
    titles = {name: workload.title for name, workload in workloads.items()}
    report.show(console, titles, found, is_gpu)
    if probes:
        report.show_probes(console, probes)
    return {
        "shape": args.shape,
        "parameters": ready["parameters"],
        "device": ready["device"],
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "versions": {"mlx": ready["mlx"], "mlx_vlm": version("mlx-vlm"), "python": platform.python_version()},
        "clock": args.clock,
        "launches": args.launches,
        "rounds": args.rounds,
        "seconds": round(time.perf_counter() - began, 1),
        "workloads": {name: {"title": titles[name], "engines": found[name]} for name in found},
        "ratios": [
            {"workload": w, "against": e, "figure": f, "ratio": report.ratio(found, w, e, f), "target": t}
            for w, e, f, t in report.targets(is_gpu)
            if report.ratio(found, w, e, f) is not None
        ],
        "probes": probes,
    }


def _answer_alone(reference: Remote, workload: str, path: Path) -> dict[str, Any]:
    """The answers one after another, stored for the engines' processes; that run's figures are a row in the tables."""
    result = reference.ask(do="reference", workload=workload, answers=str(path))
    if "error" in result:
        raise SystemExit(f"the reference failed on {workload}: {result['error']}")
    return result


def _probe(remote: Remote, workloads: Sequence[str]) -> dict[str, Any]:
    found = remote.ask(do="own_share", workload="steady")
    if "churn-8" in workloads:
        found |= remote.ask(do="copied_bytes", workload="churn-8")
    return found


def _say(console: Console, began: float, workload: str, word: str, engine: str, result: Mapping[str, Any]) -> None:
    said = result.get("error") or f"{result['seconds']:.2f} s, {result.get('answers', 'recorded')}"
    console.print(f"{_clock(began)} {workload}, {word}, {engine}: {said}", highlight=False, markup=False)


def _clock(began: float) -> str:
    return f"[{time.perf_counter() - began:4.0f} s]"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name in WANTED if name in WORKLOADS]
    parser.add_argument("--shape", choices=list(SHAPES), default="small", help="the model (default: small)")
    parser.add_argument("--workloads", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES), metavar="NAME", help=", ".join(ENGINES)
    )
    parser.add_argument("--rounds", type=int, default=2, help="timed rounds, of which the median counts (default: 2)")
    parser.add_argument("--seconds", type=float, help="begin no workload's round that would end after this")
    parser.add_argument("--vllm-python", help="the interpreter of an environment with vllm-mlx; without it, left out")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="of the BLAS on a CPU")
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
    parser.add_argument("--probes", action=argparse.BooleanOptionalAction, default=True, help="own work, copied bytes")
    parser.add_argument("--out", type=Path, help="a folder for compare.json and compare.png")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 170)
    result = run(args, console)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "compare.json").write_text(json.dumps(result), encoding="utf-8")
        found = {name: entry["engines"] for name, entry in result["workloads"].items()}
        titles = {name: entry["title"] for name, entry in result["workloads"].items()}
        if not report.draw(args.out / "compare.png", titles, found):
            console.print("no picture: matplotlib is not installed (pip install 'vlm-batch[bench]')", markup=False)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
