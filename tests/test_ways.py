"""What docs/ways.md says one reads to add something is there, at those lines."""

from __future__ import annotations

import ast

import pytest

from tests import ways


@pytest.mark.parametrize("way", ways.WAYS, ids=lambda way: way.to_add)
def test_what_one_reads_is_there(way: ways.Way) -> None:
    for one in ways.ranges(way):
        text = (ways.PACKAGE / one.file).read_text(encoding="utf-8").splitlines()
        if one.name == ways.ALL:
            assert one.num_lines == len(text)
            continue
        own = one.name.removesuffix(":").rpartition(".")[2]
        assert own in " ".join(text[one.first - 1 : one.last]), one


def test_the_page_is_current() -> None:
    page = ways.PAGE.read_text(encoding="utf-8")
    assert ways.render(page) == page, "python -m tests.ways writes it"


def test_names_that_are_gone_are_errors() -> None:
    for name in ("Gone", "Way.gone", "CacheKind.gone", "CacheKind.trim.count"):
        with pytest.raises(LookupError, match=name):
            ways.range_of("caches/layers.py", name)
    with pytest.raises(FileNotFoundError):
        ways.range_of("caches/gone.py", ways.ALL)


def test_fields_end_where_methods_begin() -> None:
    whole, fields = (
        ways.range_of("caches/window.py", name)
        for name in ("WindowState", "WindowState:")
    )
    assert fields.first == whole.first and fields.last < whole.last
    text = (ways.PACKAGE / "caches/window.py").read_text(encoding="utf-8").splitlines()
    assert text[fields.last - 1].strip() == "keep: int"


def test_a_line_counts_once_and_decorators_belong_to_it() -> None:
    found = ways.range_of("caches/window.py", "WindowState")
    (node,) = (
        node
        for node in ast.parse(
            (ways.PACKAGE / "caches/window.py").read_text(encoding="utf-8")
        ).body
        if isinstance(node, ast.ClassDef) and node.name == "WindowState"
    )
    assert found.first == node.lineno - 2 and found.last == node.end_lineno
    names = ("WindowState", "WindowState.restore", "WindowState")
    twice = ways.Way("a test", (("caches/window.py", names),))
    assert ways.num_lines(twice) == found.num_lines
