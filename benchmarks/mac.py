"""What holds on this Mac, and how fast it is, on one page: ``scripts/mac`` (or ``python -m benchmarks.mac [--help]``).

Runs the parity matrix, ``vlm-batch verify``, comparisons with mlx-vlm, ``bench`` and its ``--tune``, each in a process
of its own within a limit of time. What fails or takes too long is a line of the page, and the rest goes on.
Writes ``<chip>.md`` and ``<chip>.json`` into docs/mac, for a pull request.

``--stand-in`` rehearses it anywhere: Metal's settings on the CPU's back end, written to build/mac.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vlm_batch.assets import sample_model
from vlm_batch.policy import SETTINGS
from vlm_batch.runtime.device import Device

ROOT = Path(__file__).parent.parent
#: Tests of the matrix: answers in company beside those alone, by mlx-vlm's own classes.
MATRIX = (
    "test_parity.py",
    "test_kv_quant.py",
    "test_prefix_cache.py",
    "test_prompt_cache.py",
)
#: Families of different kinds, for ``--quick``.
FEW = ("qwen2_vl", "gemma3", "mllama", "lfm2_vl", "deepseekocr")
#: Settings whose value a step of the page measures -> that step.
MEASURED_BY = {
    "first_rows": "tune",
    "most_rows": "tune",
    "max_chunk": "tune",
    "smallest_chunk": "tune",
    "idle_budget": "tune",
    "encode_together": "tune",
    "prefill_together": "tune",
    "placement": "tune",
    "draft": "`python -m benchmarks.drafts`",
    "few_bits": "`python -m benchmarks.caches`",
    "wide_products": "`python -m benchmarks.fused`",
}
#: What measures any other setting: with it, and with another value.
BY_BENCH = "`vlm-batch bench`, with and without `--policy NAME=VALUE`"
#: Lines of a step's output that are kept if it fails.
LAST_LINES = 15


@dataclass(frozen=True)
class Step:
    """A command of the page.

    Attributes:
        module: what ``python -m`` runs, and its arguments.
        limit: seconds after which it is ended.
        tell: what it found, from the folder of its files and its output: lines of Markdown.
    """

    name: str
    title: str
    module: Sequence[str]
    limit: float
    tell: Callable[[Path, str], list[str]]


@dataclass
class Outcome:
    """What became of a step: "passed", "failed" or "too long"."""

    name: str
    command: str
    state: str
    seconds: float
    lines: list[str] = field(default_factory=list)


# The machine
# ----------------------------------------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """Return chip, memory and versions, by name."""
    facts = {"chip": _chip(), "system": platform.platform()}
    if sys.platform == "darwin":
        facts["memory"] = f"{int(_sysctl('hw.memsize')) / 2**30:.0f} GB"
        facts["cores"] = _sysctl("hw.ncpu")
    facts["Python"] = platform.python_version()
    return facts | {name: version(name) for name in ("mlx", "mlx-vlm", "vlm-batch")}


def _chip() -> str:
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string")
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()


def _sysctl(name: str) -> str:
    return subprocess.run(
        ["sysctl", "-n", name], capture_output=True, text=True, check=True
    ).stdout.strip()


# The steps
# ----------------------------------------------------------------------------------------------------------------------


def steps(folder: Path, model: str | None, *, is_quick: bool) -> list[Step]:
    """Return the page's steps in their order.

    Args:
        folder: where a step's own files go.
        model: a published model, for the last steps.
        is_quick: few families, and no comparison of servers.
    """
    chosen = ["-k", " or ".join(FEW)] if is_quick else []
    named = ["--families", *FEW] if is_quick else []
    tests = [f"tests/{name}" for name in MATRIX]
    junit = f"--junitxml={folder / 'matrix.xml'}"
    found = [
        Step(
            "matrix",
            "The parity matrix",
            ["pytest", "-q", "-p", "no:cacheprovider", junit, *tests, *chosen],
            7200,
            tell_matrix,
        ),
        Step(
            "verify",
            "`vlm-batch verify`, the embedded model in five precisions",
            ["vlm_batch", "verify", "--json", str(folder / "verify.json")],
            1800,
            tell_verify,
        ),
        Step(
            "families",
            "Tiny models of every family, beside mlx-vlm's generator",
            ["benchmarks.families", "--json", str(folder / "families.json"), *named],
            3600,
            tell_families,
        ),
    ]
    if not is_quick:
        found.append(
            Step(
                "servers",
                "The server beside mlx-vlm's",
                [
                    "benchmarks.servers",
                    "--models",
                    "tiny",
                    "--rounds",
                    "2",
                    "--out",
                    str(folder),
                ],
                1800,
                tell_servers,
            )
        )
    for name in filter(None, (str(sample_model()), model)):
        label = "the sample" if name == str(sample_model()) else f"`{name}`"
        mark = "sample" if name == str(sample_model()) else "model"
        if mark == "model":
            found.append(
                Step(
                    "verify-model",
                    f"`vlm-batch verify`, {label}",
                    [
                        "vlm_batch",
                        "verify",
                        "--model",
                        name,
                        "--json",
                        str(folder / "verify-model.json"),
                    ],
                    3600,
                    lambda where, said: tell_verify(where, said, "verify-model.json"),
                )
            )
        found.append(
            Step(
                f"bench-{mark}",
                f"`vlm-batch bench`, {label}",
                ["vlm_batch", "bench", "--model", name],
                1800,
                tell_output,
            )
        )
        found.append(
            Step(
                f"tune-{mark}",
                f"`vlm-batch bench --tune`, {label}",
                ["vlm_batch", "bench", "--model", name, "--tune"],
                1800,
                tell_output,
            )
        )
    return found


def tell_matrix(folder: Path, said: str) -> list[str]:
    """Count the matrix's cases, and name those that fail."""
    suite = next(ElementTree.parse(folder / "matrix.xml").getroot().iter("testsuite"))
    count = {
        name: int(suite.get(name, 0))
        for name in ("tests", "failures", "errors", "skipped")
    }
    passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    lines = [f"{passed} passed, {len(failed)} failed, {count['skipped']} skipped."]
    return lines + [f"- `{name}`" for name in failed]


def tell_verify(folder: Path, said: str, file: str = "verify.json") -> list[str]:
    """Make a table of what was promised and found."""
    found = json.loads((folder / file).read_text(encoding="utf-8"))
    lines = ["| model | precision | comparison | verdict |", "|---|---|---|---|"]
    for model in found["models"]:
        for one in model["comparisons"]:
            mark = "" if one["ok"] else " **(promised otherwise)**"
            lines.append(
                f"| {model['model']} | {model['precision']} | {one['name']} | {one['verdict']}{mark} |"
            )
    return lines


def tell_families(folder: Path, said: str) -> list[str]:
    """Return the comparison's own table, with launches and Python a step."""
    return [
        line for line in said.splitlines() if line.startswith(("|", "Over mlx-vlm"))
    ]


def tell_servers(folder: Path, said: str) -> list[str]:
    found = json.loads(said.strip().splitlines()[-1])
    lines = [
        "| model | requests a second, times mlx-vlm's | first tokens (p95), of mlx-vlm's |",
        "|---|---|---|",
    ]
    return lines + [
        f"| {name} | {one['requests_per_s']:.2f} | {one['ttft_p95']:.2f} |"
        for name, one in found.items()
    ]


def tell_output(folder: Path, said: str) -> list[str]:
    return ["```", *said.strip().splitlines(), "```"]


# Running and writing
# ----------------------------------------------------------------------------------------------------------------------


def run(step: Step, folder: Path, *, stands_in: bool) -> Outcome:
    """Run a step in a process of its own."""
    module = list(step.module)
    if stands_in:
        is_test = module[0] == "pytest"
        module = (
            ["pytest", "-p", "benchmarks.stand_in", *module[1:]]
            if is_test
            else ["benchmarks.stand_in", *module]
        )
    shown = f"python -m {' '.join(map(_quoted, module))}"
    print(f"{step.name}: {shown}", flush=True)
    begin = time.perf_counter()
    # what it starts itself ends with it, and does not take time from the next
    with subprocess.Popen(
        [sys.executable, "-m", *module],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as started:
        try:
            stdout, stderr = started.communicate(timeout=step.limit)
        except subprocess.TimeoutExpired:
            return Outcome(step.name, shown, "too long", step.limit)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    seconds = time.perf_counter() - begin
    state = "passed" if started.returncode == 0 else "failed"
    try:
        lines = step.tell(folder, stdout)
    except (OSError, ValueError, LookupError, StopIteration, ElementTree.ParseError):
        state = "failed"
        lines = []
    if state == "failed":
        said = (stderr or stdout).strip().splitlines()[-LAST_LINES:]
        lines = [*lines, "", "```", *said, "```"]
    return Outcome(step.name, shown, state, seconds, lines)


def _quoted(word: str) -> str:
    return f'"{word}"' if " " in word else word


def assumed() -> list[str]:
    """Return a table of Metal's settings that nobody has measured on a Mac."""
    lines = ["| setting | value | why | what would change it |", "|---|---|---|---|"]
    for name, setting in SETTINGS.items():
        value, source = setting.values[Device.METAL]
        if not source.startswith("measured"):
            lines.append(
                f"| `{name}` | {value} | {source} | {MEASURED_BY.get(name, BY_BENCH)} |"
            )
    return lines


def page(
    facts: dict[str, str], made: Sequence[tuple[Step, Outcome]], *, stands_in: bool
) -> str:
    """Return the page as Markdown."""
    title = f"{facts['chip']}, standing in for a Mac" if stands_in else facts["chip"]
    lines = [
        f"# {title}",
        "",
        "Made by `scripts/mac`. Ratios are our figure over the other's.",
        "",
    ]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    lines += ["", "| step | outcome | seconds |", "|---|---|---|"]
    lines += [
        f"| {step.title} | {outcome.state} | {outcome.seconds:.0f} |"
        for step, outcome in made
    ]
    for step, outcome in made:
        lines += [
            "",
            f"## {step.title}",
            "",
            f"`{outcome.command}`",
            "",
            *outcome.lines,
        ]
    lines += ["", "## Assumed of Metal", "", *assumed(), ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps, and write page and JSON. Returns 1 if a step failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder or hub id to verify and measure, too")
    parser.add_argument("--only", nargs="+", help="names of steps (default: all)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="five families, and no comparison of servers",
    )
    parser.add_argument(
        "--stand-in", action="store_true", help="rehearse Metal's settings on a CPU"
    )
    parser.add_argument(
        "--out", type=Path, help="default: docs/mac, or build/mac of a stand-in"
    )
    args = parser.parse_args(arguments)
    if sys.platform != "darwin" and not args.stand_in:
        parser.error("this is not a Mac; --stand-in rehearses it")
    out = args.out or ROOT / ("build/mac" if args.stand_in else "docs/mac")
    facts = machine()
    name = re.sub(r"\W+", "-", facts["chip"].lower()).strip("-")
    out.mkdir(parents=True, exist_ok=True)
    # no step tells what an earlier run found
    with tempfile.TemporaryDirectory(prefix="vlm-batch-mac-") as folder:
        outcomes = _measure(args, facts, Path(folder), out / name)
    print(f"written: {out / name}.md")
    return int(any(outcome.state != "passed" for outcome in outcomes))


def _measure(
    args: argparse.Namespace, facts: dict[str, str], folder: Path, to: Path
) -> list[Outcome]:
    """Run the chosen steps, and write page and JSON beside ``to`` after each."""
    made: list[tuple[Step, Outcome]] = []
    for step in steps(folder, args.model, is_quick=args.quick):
        if args.only and step.name not in args.only:
            continue
        made.append((step, run(step, folder, stands_in=args.stand_in)))
        # written after each step: what was measured stays if the machine is needed
        text = page(facts, made, stands_in=args.stand_in)
        to.with_name(f"{to.name}.md").write_text(text, encoding="utf-8")
        record: dict[str, Any] = {
            "machine": facts,
            "steps": [vars(outcome) for _, outcome in made],
        }
        to.with_name(f"{to.name}.json").write_text(
            json.dumps(record, indent=1), encoding="utf-8"
        )
    return [outcome for _, outcome in made]


if __name__ == "__main__":
    sys.exit(main())
