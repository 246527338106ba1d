"""Counts of how the package is laid out, each beside its goal: ``scripts/house``, or ``python -m tests.house [--json]``."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import walk_packages
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

import vlm_batch
from tests.density import num_fields, outermost, rate, several, step_branches
from tests.test_imports import FLOOR, FLOORS
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.family import FamilyHooks
from vlm_batch.models import families
from vlm_batch.policy import SETTINGS

PACKAGE = Path(vlm_batch.__file__).parent
MAX_LINES, MAX_METHODS = 95, 25
#: Words that a docstring does not begin with: it says what a thing is or does.
QUESTIONS = ("what", "which", "whether", "how")
#: Where records of a request may lie, and fields of theirs.
BODY_ROOMS = ("types", "batcher", "engine", "handle", "inputs")
OF_REQUESTS = ("request_id", "image_sizes")
#: Types of fields that are numbers alone, an id among them.
NUMBERS = frozenset({"int", "float", "bool", "str", "tuple", "None"})
#: Rooms that know the classes of caches on purpose: what they are made of, and the families.
KNOW_CACHES = ("models", "adapters")
#: Members of an adapter that the engine calls and reads, and no family has of its own.
CALLS = frozenset(name for name in vars(Adapter) if not name.startswith("_"))
#: How many of the last families that were added are looked at.
LAST_FAMILIES = 7


@dataclass(frozen=True)
class Count:
    """One line of the table; ``of`` names what was counted, where that is short."""

    what: str
    now: str
    goal: str
    of: str = ""


@dataclass(frozen=True)
class Source:
    """A file of the package, read."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Its path within the package."""
        return str(self.path.relative_to(PACKAGE))

    @property
    def room(self) -> str:
        """The folder that it lies in, or its own name."""
        return self.path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def sources() -> list[Source]:
    """Every file of the package."""
    texts = {
        path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))
    }
    return [Source(path, text, ast.parse(text)) for path, text in texts.items()]


# A request's way
# ----------------------------------------------------------------------------------------------------------------------


class Way:
    """What of the package any thread executes while it is on: functions, lines, classes with a method called."""

    def __init__(self) -> None:
        self.is_on = False
        self.functions: set[tuple[str, str]] = set()
        self.lines: set[tuple[str, int]] = set()
        self.classes: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not (self.is_on and code.co_filename.startswith(str(PACKAGE))):
            return None
        if not code.co_name.startswith("<"):
            named = f"{code.co_firstlineno}:{code.co_name}"
            self.functions.add((code.co_filename, named))
        owner = type(frame.f_locals.get("self")).__name__
        if "self" in frame.f_locals:
            self.classes.add((code.co_filename, owner))
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.is_on and event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


def way_of_a_request() -> Way:
    """The way of one picture and three tokens from ``submit`` to its result, through the embedded checkpoint."""
    from vlm_batch import SamplingParams, VLMBatcher
    from vlm_batch.assets import default_checkpoint, sample_images
    from vlm_batch.runtime import threads

    way = Way()
    for idle in threads._idle.values():
        # those of earlier batchers would be used again, and have no profile
        idle.clear()
    threading.settrace(way)  # threads that start from here on
    sys.settrace(way)
    try:
        with VLMBatcher(default_checkpoint()) as batcher:
            picture, params = sample_images()[0], SamplingParams(max_tokens=3)
            way.is_on = True
            result = batcher.submit(
                picture, "describe the picture", params=params
            ).result()
            way.is_on = False
    finally:
        sys.settrace(None)
        threading.settrace(None)
    assert result.ok and len(result.token_ids) == 3, result
    return way


def bodies() -> list[str]:
    """The records that a request becomes in turn.

    Dataclasses with its id or its pictures' sizes, and those that hold one of these. None are records of numbers alone, such as
    the scheduler's, what is reported of a request while it runs (events), and parts of a record.
    """
    fields = {
        value.__name__: [
            (field.name, str(field.type)) for field in dataclasses.fields(value)
        ]
        for module in walk_packages(vlm_batch.__path__, "vlm_batch.")
        if module.name.split(".")[1] in BODY_ROOMS
        for value in vars(importlib.import_module(module.name)).values()
        if isinstance(value, type)
        and dataclasses.is_dataclass(value)
        and value.__module__ == module.name
    }
    whole = {
        name: kinds
        for name, kinds in fields.items()
        if not name.endswith("Event")
        and any(set(re.findall(r"\w+", kind)) - NUMBERS for _, kind in kinds)
    }
    found = {
        name
        for name, kinds in whole.items()
        if any(field in OF_REQUESTS for field, _ in kinds)
    }
    return sorted(
        found
        | {
            name
            for name, kinds in whole.items()
            if any(kind.split(" | ")[0] in found for _, kind in kinds)
        }
    )


# Imports
# ----------------------------------------------------------------------------------------------------------------------


def arrows(files: list[Source]) -> dict[tuple[str, str], set[bool]]:
    """(room, room that it imports) -> whether for the type checker only, for each import."""
    found: dict[tuple[str, str], set[bool]] = {}
    for file in files:
        checked = {
            id(child)
            for node in ast.walk(file.tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for child in ast.walk(node)
        }
        for node in ast.walk(file.tree):
            for room in imported_rooms(node):
                if room != file.room and file.room != "__init__":
                    found.setdefault((file.room, room), set()).add(id(node) in checked)
    return found


def imported_rooms(node: ast.AST) -> Iterator[str]:
    """The rooms that an import statement reaches into."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = (
            [node.module]
            if node.module != "vlm_batch"
            else [f"vlm_batch.{alias.name}" for alias in node.names]
        )
    return (name.split(".")[1] for name in names if name.startswith("vlm_batch."))


def circles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """The rooms that can be reached from themselves, together with those on the way."""
    reach: dict[str, set[str]] = {}
    for start in edges:
        seen: set[str] = set()
        todo = list(edges[start])
        while todo:
            if (room := todo.pop()) not in seen:
                seen.add(room)
                todo += edges.get(room, ())
        reach[start] = seen
    found: list[set[str]] = []
    for start, seen in reach.items():
        circle = {room for room in seen if start in reach.get(room, set())}
        if start in seen and circle not in found:
            found.append(circle)
    return found


# Sizes and words
# ----------------------------------------------------------------------------------------------------------------------


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function, methods and inner ones included."""
    return (
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, from ``def`` to the last; of a constructor without its signature, whose options stand one a line."""
    first = node.body[0].lineno if node.name == "__init__" else node.lineno
    return (node.end_lineno or first) - first + 1


def methods(node: ast.ClassDef) -> int:
    """Functions in a class's own body."""
    return sum(
        isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in node.body
    )


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Named parameters without ``self``."""
    return len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) - 1


def cache_branches(tree: ast.AST, classes: set[str]) -> int:
    """Decisions by the class of a cache: ``isinstance``, ``type(x) is``, and ``case`` with one of ``classes``."""
    count = 0
    for node in ast.walk(tree):
        named: Sequence[ast.AST] = ()
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            named = node.args[1:]
        elif (
            isinstance(node, ast.Compare)
            and isinstance(node.left, ast.Call)
            and ast.unparse(node.left.func) == "type"
        ):
            named = node.comparators
        elif isinstance(node, ast.MatchClass):
            named = [node.cls]
        count += any(
            isinstance(part, ast.Name) and part.id in classes
            for one in named
            for part in ast.walk(one)
        )
    return count


def shape_branches(tree: ast.AST) -> int:
    """Decisions by which kind of shapes an engine has: by their class, by ``exact``, or by a flag that says so."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            last = ast.unparse(node.left).split(".")[-1].strip("_")
            count += last == "exact" and isinstance(
                node.ops[0], (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)
            )
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "isinstance",
            "type",
        ):
            count += any(
                kind in ast.unparse(node) for kind in ("FixedShapes", "FreeShapes")
            )
        elif isinstance(node, (ast.Name, ast.Attribute)):
            count += ast.unparse(node).split(".")[-1] == "goes_by_shapes"
    return count


def cache_classes(files: list[Source]) -> set[str]:
    """The classes in ``caches``, and those of mlx-vlm's that any file imports from its caches."""
    own = {
        node.name
        for file in files
        if file.room == "caches"
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Cache", "States"))
    }
    theirs = {
        alias.asname or alias.name
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ImportFrom) and node.module == "mlx_vlm.models.cache"
        for alias in node.names
        if alias.name[0].isupper()
    }
    return own | theirs | {"CacheList"}


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """(owner, text) of a file's docstring and those of its classes and functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    owners = (node for node in ast.walk(tree) if isinstance(node, kinds))
    return ((node, text) for node in owners if (text := ast.get_docstring(node)))


def asks(owner: ast.AST, docstring: str) -> bool:
    """Whether a docstring begins with a question's word. A function that returns a truth value may: that is its contract."""
    returns = (
        owner.returns
        if isinstance(owner, (ast.FunctionDef, ast.AsyncFunctionDef))
        else None
    )
    is_predicate = returns is not None and ast.unparse(returns) == "bool"
    return not is_predicate and docstring.split()[0].strip(".,:").lower() in QUESTIONS


def files_of_families() -> dict[str, int]:
    """The last families that were added -> how many code files of the package their commits changed; empty without a history.

    A commit that also deletes or renames files is a move.
    """
    if shutil.which("git") is None:
        return {}
    log = subprocess.run(
        [
            "git",
            "log",
            "--no-merges",
            "--find-renames",
            "--name-status",
            "--format=tformat:@",
            "--",
            "vlm_batch",
        ],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
    ).stdout
    own = {
        f"vlm_batch/models/{str(spec.adapter.__module__).split('.')[-1]}.py"
        for spec in families()
        if spec.adapter
    }
    found: dict[str, int] = {}
    for commit in log.split("@\n"):
        changed = [
            line.split("\t") for line in commit.splitlines() if line.endswith(".py")
        ]
        new = [
            names[-1]
            for status, *names in changed
            if status == "A" and names[-1] in own
        ]
        if len(new) == 1 and all(status in ("A", "M") for status, *_ in changed):
            found.setdefault(Path(new[0]).stem, len(changed))
    return dict(list(found.items())[:LAST_FAMILIES])


# The drawing
# ----------------------------------------------------------------------------------------------------------------------

#: What stands around the drawing in docs/architecture.md.
BEGIN, END = "<!-- rooms -->\n", "<!-- /rooms -->\n"


def drawing() -> str:
    """The rooms by floor, the highest first, as docs/architecture.md shows them."""
    floors = [
        " · ".join(f"{room}/" if (PACKAGE / room).is_dir() else room for room in rooms)
        for rooms in FLOORS
    ]
    return f"{BEGIN}```\n{chr(10).join(reversed(floors))}\n```\n{END}"


# The table
# ----------------------------------------------------------------------------------------------------------------------


def count_all() -> list[Count]:
    """Every line of the table."""
    files = sources()
    return [
        *count_way(),
        *count_imports(files),
        *count_density(files),
        *count_sizes(files),
        *count_adapter(),
        *count_settings(files),
        *count_words(files),
        *count_families(),
    ]


def count_way() -> list[Count]:
    """What one request passes, and becomes."""
    way, records = way_of_a_request(), bodies()
    return [
        Count(
            "lines that one picture and three tokens execute",
            f"{len(way.lines):,}",
            "1,900",
        ),
        Count("classes with a method on that way", str(len(way.classes)), "50"),
        Count("bodies of a request", str(len(records)), "4", ", ".join(records)),
    ]


def count_imports(files: list[Source]) -> list[Count]:
    """Circles and upward arrows between rooms, and the biggest room."""
    found = arrows(files)
    edges: dict[str, set[str]] = {}
    for (here, there), kinds in found.items():
        if False in kinds:
            edges.setdefault(here, set()).add(there)
    rings = circles(edges)
    upward = [
        (here, there)
        for here, there in sorted(found)
        if FLOOR.get(there, 99) >= FLOOR.get(here, -1)
    ]
    at_run_time = [arrow for arrow in upward if False in found[arrow]]
    lines: Counter[str] = Counter()
    for file in files:
        lines[
            "(files beside the rooms)" if file.path.parent == PACKAGE else file.room
        ] += len(file.text.splitlines())
    room, most = lines.most_common(1)[0]
    return [
        Count(
            "import circles between rooms",
            str(len(rings)),
            "0",
            "; ".join(", ".join(sorted(one)) for one in rings),
        ),
        Count(
            "upward arrows when it runs",
            str(len(at_run_time)),
            "0",
            _shown(at_run_time),
        ),
        Count(
            "upward arrows for the type checker",
            str(len(upward) - len(at_run_time)),
            "1",
            _shown([arrow for arrow in upward if arrow not in at_run_time]),
        ),
        Count(
            "lines in the biggest room",
            f"{100 * most / sum(lines.values()):.0f} %",
            "under 28 %",
            room,
        ),
    ]


def _shown(found: list[tuple[str, str]]) -> str:
    return ", ".join(f"{here} to {there}" for here, there in found)


def count_density(files: list[Source]) -> list[Count]:
    """How dense the code is, and where a row is."""
    counted = {file.name: list(outermost(file.tree.body)) for file in files}
    everything = [one for found in counted.values() for one in found]
    engine = [
        one
        for name, found in counted.items()
        for one in found
        if name.startswith("engine/")
    ]
    dense = [one.name for one in everything if one.is_dense]
    classes = [
        (node.name, file.name)
        for file in files
        if file.room != "models"
        for node in file.tree.body
        if isinstance(node, ast.ClassDef)
    ]
    names = several(classes)
    trees = {file.name: file.tree for file in files}
    step = step_branches(trees["engine/generator.py"], "BatchGenerator", "step")
    return [
        Count(
            "branches for 100 lines of functions: package; engine",
            f"{rate(everything):.1f}; {rate(engine):.1f}",
            "22; 22",
        ),
        Count("dense functions", str(len(dense)), "3", ", ".join(dense)),
        Count("class names in several files", str(len(names)), "3", ", ".join(names)),
        Count(
            "fields of the row's classes", str(num_fields(trees["engine/row.py"])), "55"
        ),
        Count("branches in `step` and what it calls in its file", str(step), "40"),
    ]


def count_sizes(files: list[Source]) -> list[Count]:
    """Long functions, wide classes, wide constructors."""
    long = [
        f"{node.name} ({num_lines(node)})"
        for file in files
        for node in functions(file.tree)
        if num_lines(node) > MAX_LINES
    ]
    classes = [
        node
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef)
    ]
    wide = [
        f"{node.name} ({methods(node)})"
        for node in classes
        if methods(node) > MAX_METHODS
    ]
    made = [
        (parameters(one), node.name) for node in classes for one in constructors(node)
    ]
    most, owner = max(made)
    root = sum(file.path.parent == PACKAGE for file in files)
    return [
        Count("files at the package's root", str(root), "14"),
        Count(
            f"functions over {MAX_LINES} lines", str(len(long)), "0", ", ".join(long)
        ),
        Count(
            f"classes over {MAX_METHODS} methods", str(len(wide)), "1", ", ".join(wide)
        ),
        Count("most parameters of a constructor", str(most), "8", owner),
    ]


def count_settings(files: list[Source]) -> list[Count]:
    """Places where a setting is declared, and what users must choose from."""
    declared = Counter(
        name
        for file in files
        if file.room not in KNOW_CACHES
        for name in declarations(file.tree)
    )
    most = max(declared.values())
    made = {
        child.name: parameters(child)
        for file in files
        if file.room == "batcher"
        for node in file.tree.body
        if isinstance(node, ast.ClassDef)
        for child in node.body
        if isinstance(child, ast.FunctionDef)
    }
    return [
        Count(
            "most declarations of a setting",
            str(most),
            "2",
            ", ".join(n for n in declared if declared[n] == most),
        ),
        Count(
            "parameters of VLMBatcher; of submit",
            f"{made['__init__']}; {made['submit']}",
            "14; 14",
        ),
    ]


def declarations(tree: ast.Module) -> Iterator[str]:
    """The settings that a file declares, each time: as a class's field, or in a table at its top."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            fields = [
                child.target for child in node.body if isinstance(child, ast.AnnAssign)
            ]
            yield from (
                field.id
                for field in fields
                if isinstance(field, ast.Name) and field.id in SETTINGS
            )
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            parts = list(ast.walk(node))
            texts = [part.value for part in parts if isinstance(part, ast.Constant)]
            said = texts + [part.arg for part in parts if isinstance(part, ast.keyword)]
            yield from (
                name for name in said if isinstance(name, str) and name in SETTINGS
            )


def constructors(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """A class's own ``__init__``, if it has one."""
    return [
        child
        for child in node.body
        if isinstance(child, ast.FunctionDef) and child.name == "__init__"
    ]


def public_members() -> set[str]:
    """The names that a family inherits and may override, and the calls of the engine's."""
    return {
        name
        for kind in (FamilyHooks, Adapter)
        for name in {**vars(kind), **vars(kind).get("__annotations__", {})}
        if not name.startswith("_")
    }


def count_adapter() -> list[Count]:
    """The class that families inherit from: its members, and those that are hooks of hardly anybody."""
    kinds = [spec.adapter for spec in families() if spec.adapter is not None]
    own = {
        kind: {
            name
            for base in kind.__mro__[: kind.__mro__.index(Adapter)]
            for name in vars(base)
        }
        for kind in kinds
    }
    users = {
        name: sum(name in names for names in own.values())
        for name in public_members() - CALLS
    }
    nobody, one = (
        sorted(name for name, count in users.items() if count == number)
        for number in (0, 1)
    )
    return [
        Count(
            "public members of Adapter; the engine's calls among them",
            f"{len(public_members())}; {len(CALLS)}",
            "40",
        ),
        Count(
            "hooks that no family overrides", str(len(nobody)), "0", ", ".join(nobody)
        ),
        Count("hooks that one family overrides", str(len(one)), "0", ", ".join(one)),
    ]


def count_words(files: list[Source]) -> list[Count]:
    """Branches on caches, and docstrings that ask."""
    classes = cache_classes(files)
    branches = {
        file.name: cache_branches(file.tree, classes)
        for file in files
        if file.room not in KNOW_CACHES
    }
    texts = [one for file in files for one in docstrings(file.tree)]
    kinds = {
        file.name: shape_branches(file.tree)
        for file in files
        if file.name != "engine/shapes.py"
    }
    return [
        Count(
            "branches on the kind of shapes outside shapes.py",
            str(sum(kinds.values())),
            "0",
            ", ".join(f"{name} ({count})" for name, count in kinds.items() if count),
        ),
        Count(
            "branches on the type of a cache, families apart",
            f"{sum(branches.values())} in {sum(map(bool, branches.values()))} files",
            "under 8",
            ", ".join(f"{name} ({count})" for name, count in branches.items() if count),
        ),
        Count(
            f"docstrings that begin with {', '.join(QUESTIONS)}, predicates apart",
            f"{sum(asks(*one) for one in texts)} of {len(texts)}",
            "0",
        ),
    ]


def count_families() -> list[Count]:
    """Files that were changed for a new family."""
    counts = files_of_families()
    now = (
        f"{min(counts.values())} to {max(counts.values())}" if counts else "no history"
    )
    last = ", ".join(f"{family} ({count})" for family, count in counts.items())
    return [Count("files changed to add a family", now, "1, and its tiny model", last)]


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="the counts for a machine")
    parser.add_argument(
        "--rooms",
        action="store_true",
        help="the drawing of the rooms in docs/architecture.md, made anew",
    )
    options = parser.parse_args()
    if options.rooms:
        page = PACKAGE.parent / "docs" / "architecture.md"
        text = page.read_text(encoding="utf-8")
        page.write_text(
            text[: text.index(BEGIN)] + drawing() + text[text.index(END) + len(END) :],
            encoding="utf-8",
        )
        return
    counts = count_all()
    if options.json:
        print(json.dumps([dataclasses.asdict(count) for count in counts], indent=1))
        return
    table = Table("", "now", "goal", "which", box=None, pad_edge=False)
    for count in counts:
        table.add_row(count.what, count.now, count.goal, count.of)
    Console(soft_wrap=False).print(table)


if __name__ == "__main__":
    main()
