"""How dense the code is to read: branches for each line, dense functions, names that stand for several things."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

#: What is one branch each. Further operands of and / or are, and filters of comprehensions, too.
BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.IfExp,
    ast.ExceptHandler,
    ast.Assert,
    ast.comprehension,
)
#: A function is dense with so many branches, at so many a line.
DENSE_BRANCHES, DENSE_RATE = 10, 0.7


@dataclass(frozen=True)
class Counted:
    """An outermost function or a method: its branches, and its lines without the docstring."""

    name: str
    branches: int
    lines: int

    @property
    def is_dense(self) -> bool:
        rate = self.branches / self.lines
        return self.branches >= DENSE_BRANCHES and rate >= DENSE_RATE


def branches_of(function: Function) -> int:
    count = 0
    for node in ast.walk(function):
        if isinstance(node, BRANCHES):
            count += 1
        if isinstance(node, ast.comprehension):
            count += len(node.ifs)
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
    return count


def lines_of(function: Function) -> int:
    """Lines from ``def`` to the last, without the docstring."""
    assert function.end_lineno is not None
    count = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        first = function.body[0]
        assert first.end_lineno is not None
        count -= first.end_lineno - first.lineno + 1
    return max(1, count)


def outermost(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[Counted]:
    """Count the functions of a body, and methods of its classes; what is inside them counts as theirs."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield Counted(prefix + node.name, branches_of(node), lines_of(node))
        elif isinstance(node, ast.ClassDef):
            yield from outermost(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from outermost(node.body, prefix)


def rate(counted: Sequence[Counted]) -> float:
    """Branches for each 100 lines."""
    lines = sum(one.lines for one in counted)
    return 100 * sum(one.branches for one in counted) / max(1, lines)


def several(classes: Sequence[tuple[str, str]]) -> list[str]:
    """Names of classes that stand in several files; ``classes``: (name, file)."""
    files: defaultdict[str, set[str]] = defaultdict(set)
    for name, file in classes:
        files[name].add(file)
    return sorted(name for name, where in files.items() if len(where) > 1)


def num_fields(tree: ast.Module) -> int:
    """Annotated fields of a file's classes."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return sum(isinstance(part, ast.AnnAssign) for one in classes for part in one.body)


def step_branches(tree: ast.Module, owner: str, method: str) -> int:
    """Branches of a method and of those of its file that it calls, at any depth."""
    (made,) = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == owner
    ]
    own = {node.name: node for node in made.body if isinstance(node, ast.FunctionDef)}
    todo = [method]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen or name not in own:
            continue
        seen.add(name)
        todo += [
            node.attr
            for node in ast.walk(own[name])
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ]
    return sum(branches_of(own[name]) for name in seen)
