"""The counts of how dense the code is count what they say."""

from __future__ import annotations

import ast

import pytest

from tests import density

DENSE = """
def dense(a):
    \"\"\"A docstring
    of two lines.\"\"\"
    x = [b for b in a if b and b > 1 or b < -1]
    y = [b if b else 1 for b in a if b]
    assert x and y or a and x
    return [b for b in a if b]
"""


def only(text: str) -> density.Counted:
    (found,) = density.outermost(ast.parse(text).body)
    return found


@pytest.mark.parametrize(
    ("line", "branches"),
    [
        ("pass", 0),
        ("if a: pass", 1),
        ("for b in a: pass", 1),
        ("return 1 if a else 2", 1),
        ("return a and b or c", 2),
        ("return [b for b in a if b if c]", 3),
        ("assert a", 1),
        ("return (lambda: a or b)", 1),
        ("while a: pass", 1),
    ],
)
def test_branches(line: str, branches: int) -> None:
    assert only(f"def one(a, b, c):\n    {line}\n").branches == branches


def test_a_dense_function() -> None:
    found = only(DENSE)
    assert (found.lines, found.branches, found.is_dense) == (5, 13, True)
    wide = "\n".join(["def wide(a):", *["    if a: pass"] * 10, *["    pass"] * 5])
    assert not only(wide).is_dense


def test_methods_are_counted_and_what_is_inside_is_theirs() -> None:
    text = "class One:\n    def a(self):\n        def b(c):\n            return c or 1\n        return b\n"
    (found,) = density.outermost(ast.parse(text).body)
    assert (found.name, found.branches, found.lines) == ("One.a", 1, 4)
    assert density.rate([found]) == 25


def test_names_that_stand_in_several_files() -> None:
    assert density.several([("A", "x"), ("A", "y"), ("B", "x"), ("B", "x")]) == ["A"]


def test_fields_and_the_step() -> None:
    text = (
        "class Row:\n    a: int\n    b: int = 1\n\n"
        "class Maker:\n"
        "    def step(self):\n        self._one()\n        if self.other: pass\n"
        "    def _one(self):\n        return self._two() or 1\n"
        "    def _two(self):\n        for _ in (): pass\n"
        "    def unrelated(self):\n        assert True\n"
    )
    tree = ast.parse(text)
    assert density.num_fields(tree) == 2
    assert density.step_branches(tree, "Maker", "step") == 3
