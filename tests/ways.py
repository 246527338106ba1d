"""What one reads to add something: ``python -m tests.ways`` writes the tables of docs/ways.md.

A way is a list of files and of what one must read there. Lines are found by the parser, so a name that is gone is an error
and a range cannot go stale.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vlm_batch"
PAGE = ROOT / "docs/ways.md"
BEGIN = "<!-- ways: written by python -m tests.ways -->\n"
END = "<!-- end of ways -->\n"
#: The name that stands for a whole file.
ALL = "*"


@dataclass(frozen=True)
class Way:
    """What one reads to add a thing: files of the package, and names in them.

    A name is a class, a function, an assignment, ``Class.method``, ``Class:`` (its docstring and fields, before its first
    method), or ``ALL``.
    """

    to_add: str
    reads: tuple[tuple[str, tuple[str, ...]], ...]


class Range(NamedTuple):
    """Lines [first, last] of a file, and what stands there."""

    file: str
    name: str
    first: int
    last: int

    @property
    def num_lines(self) -> int:
        return self.last - self.first + 1


WAYS = (
    Way(
        "a sampling option",
        (
            ("parameters.py", ("declared",)),
            ("types/sampling.py", ("SamplingParams:",)),
            (
                "engine/sampling.py",
                (
                    "SamplingRow",
                    "LogitsStage",
                    "STAGES",
                    "stages_of",
                    "process",
                ),
            ),
            ("server/sampled.py", ("SampledBody",)),
        ),
    ),
    Way(
        "a family with a sliding window",
        (
            ("registry.py", ("ModelSpec", "register")),
            ("adapters/family.py", (ALL,)),
            ("models/aya_vision.py", (ALL,)),
        ),
    ),
    Way(
        "another way to cut prompts",
        (
            ("engine/work.py", ("Work",)),
            (
                "engine/schedule.py",
                (
                    "PrefillRow",
                    "chunks",
                    "_end_of_chunk",
                    "_in_prefill_order",
                ),
            ),
            ("engine/planning.py", ("Planner.chunks",)),
            ("engine/pace.py", ("Pace.budget",)),
            (
                "engine/shapes.py",
                (
                    "FreeShapes.ends",
                    "FreeShapes.groups",
                    "FreeShapes.prefill_call",
                    "FixedShapes.ends",
                    "FixedShapes.groups",
                    "FixedShapes.prefill_call",
                ),
            ),
            ("engine/lengths.py", ("chunk_end", "padded_length")),
            ("engine/runner.py", ("Runner.prefill",)),
        ),
    ),
    Way(
        "a kind of cache",
        (
            ("caches/layers.py", (ALL,)),
            ("caches/states.py", ("LayerState", "filed")),
            ("caches/window.py", (ALL,)),
            ("caches/recurrent.py", ("RecurrentCache",)),
            ("caches/verified.py", ("VERIFIED",)),
            ("adapters/attention.py", ("STATES",)),
        ),
    ),
    Way(
        "a way to code keys and values",
        (
            ("caches/coded.py", (ALL,)),
            ("caches/states.py", ("LayerState", "filed")),
            (
                "caches/quantized.py",
                (
                    "PackedLayout",
                    "QuantizedStates",
                    "QuantizedCache",
                    "QuantizedState",
                    "QuantizedSlabCache",
                ),
            ),
            ("caches/quantisation.py", ("Scheme", "SCHEMES")),
            ("adapters/attention.py", ("STATES",)),
            ("adapters/operations.py", ("attend_packed",)),
        ),
    ),
    Way(
        "an output format",
        (
            ("jobs/formats.py", (ALL,)),
            (
                "jobs/sinks.py",
                (
                    "FORMS",
                    "SUFFIXES",
                    "open_sink",
                    "_formats",
                    "MadeFile._made",
                    "MadeFile._make",
                ),
            ),
        ),
    ),
)


@cache
def _tree(file: str) -> tuple[ast.Module, int]:
    text = (PACKAGE / file).read_text(encoding="utf-8")
    return ast.parse(text), len(text.splitlines())


def _named(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield names that statements define."""
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, ast.Assign):
            for target in ast.walk(node):
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                    yield target.id, node


def range_of(file: str, name: str) -> Range:
    """Find a name in a file of the package.

    Raises:
        FileNotFoundError: there is no such file.
        LookupError: the file does not define the name.
    """
    tree, length = _tree(file)
    if name == ALL:
        return Range(file, name, 1, length)
    body: list[ast.stmt] = tree.body
    node: ast.stmt | None = None
    for part in name.removesuffix(":").split("."):
        node = dict(_named(body)).get(part)
        if node is None:
            raise LookupError(f"{file} has no {name}")
        body = getattr(node, "body", [])
    assert node is not None and node.end_lineno is not None
    last = node.end_lineno
    if name.endswith(":"):
        last = _last_before_methods(body, last)
    return Range(file, name, _first_line(node), last)


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])


def _last_before_methods(body: list[ast.stmt], last: int) -> int:
    """Return the last line of what a class has before its first method."""
    for before, node in pairwise(body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return before.end_lineno or last
    return last


def ranges(way: Way) -> list[Range]:
    found: list[Range] = []
    for file, names in way.reads:
        found += [range_of(file, name) for name in names]
    return found


def num_lines(way: Way) -> int:
    """Count the lines that a way has one read, each once."""
    lines: set[tuple[str, int]] = set()
    for one in ranges(way):
        lines.update((one.file, line) for line in range(one.first, one.last + 1))
    return len(lines)


def table(way: Way) -> str:
    lines = [
        f"## To add {way.to_add}",
        "",
        f"{num_lines(way):,} lines.",
        "",
        "| file | what | lines |",
        "|---|---|---|",
    ]
    for one in ranges(way):
        what = f"`{one.name}`"
        if one.name == ALL:
            what = "all of it"
        elif one.name.endswith(":"):
            what = f"`{one.name[:-1]}`, its fields"
        lines.append(
            f"| `vlm_batch/{one.file}` | {what} | {one.first}-{one.last} ({one.num_lines}) |"
        )
    return "\n".join(lines) + "\n"


def render(page: str) -> str:
    """Return the page with the tables as they are now."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    tables = "\n".join(table(way) for way in WAYS)
    return f"{head}{BEGIN}\n{tables}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for each in WAYS:
        print(f"{num_lines(each):6,} {each.to_add}")
