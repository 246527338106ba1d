"""Tables and pictures that the documentation takes from committed data: they are as the data have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import figures
from tests import exact_page

FOUND = figures.read()
RATIOS = [(kind, one) for kind in figures.KINDS for one in FOUND[kind]["ratios"]]


def test_the_benchmarks_page_is_up_to_date() -> None:
    page = figures.PAGE.read_text(encoding="utf-8")
    assert page == figures.render(page, FOUND), "run python -m benchmarks.figures"


def test_the_page_of_families_is_up_to_date() -> None:
    page = figures.FAMILIES_PAGE.read_text(encoding="utf-8")
    assert page == figures.render_families(page), "run python -m benchmarks.figures"


def test_each_family_has_what_its_step_takes() -> None:
    """An error of the benchmark's own would leave mlx-vlm's figures alone in the row."""
    found = figures.read_families("cpu")
    assert found is not None
    for name, family in found["families"].items():
        assert "own_ms" in family["steps"]["vlm_batch"], name


@pytest.mark.parametrize("kind", figures.KINDS)
def test_a_picture_is_up_to_date_and_has_a_bar_for_each_figure(kind: str) -> None:
    drawn = figures.image(kind).read_text(encoding="utf-8")
    assert drawn == figures.picture(FOUND[kind]), "run python -m benchmarks.figures"
    bars = [
        node
        for node in ElementTree.fromstring(drawn).iter()
        if node.tag.endswith("rect")
    ]
    assert len(bars) - 1 == sum(
        len(seconds) for seconds in FOUND[kind]["loads"].values()
    )


@pytest.mark.parametrize(
    ("kind", "one"), RATIOS, ids=[f"{kind}-{one['what']}" for kind, one in RATIOS]
)
def test_a_figure_agrees_with_itself(kind: str, one: dict[str, Any]) -> None:
    """A ratio lies within its range and is that of the two figures beside it; medians of ratios may be a few hundredths off."""
    low, high = one.get("range", (0, float("inf")))
    assert low <= one["ratio"] <= high
    words = one.get("of", "").split(" of ")
    if len(words) == 2:
        ours, theirs = float(words[0]), float(words[1].split()[0])
        assert abs(ours / theirs - one["ratio"]) <= 0.04


@pytest.mark.parametrize(
    ("one", "missed"),
    [
        ({"ratio": 0.51, "wanted": 0.5}, True),
        ({"ratio": 0.5, "wanted": 0.5}, False),
        ({"ratio": 1.93, "at_least": 3}, True),
        ({"ratio": 8.75, "at_least": 3}, False),
        ({"ratio": 9.0}, False),
    ],
)
def test_what_is_missed(one: dict[str, Any], missed: bool) -> None:
    assert figures.is_missed(one) is missed
    row = figures.ratios_table(
        {"ratios": [{"what": "time", "over": "theirs", **one}]}
    ).splitlines()[-1]
    assert ("**missed**" in row) is missed


@pytest.mark.parametrize("page", exact_page.PAGES, ids=lambda page: page.name)
def test_the_record_of_exactness_is_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == exact_page.render(
        text, json.loads(exact_page.DATA.read_text(encoding="utf-8"))
    ), "run python -m tests.exact_page"


def test_the_benchmarks_page_is_short() -> None:
    assert len(figures.PAGE.read_text(encoding="utf-8").split()) <= 2500
