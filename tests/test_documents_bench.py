"""The benchmark of pages an hour: its pages, and its table of small ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import documents

ROOT = Path(__file__).parent.parent


def test_pages_are_of_three_kinds_and_all_different() -> None:
    pages = documents.make_pages(6, 7, (200, 1500))
    assert {page.picture.size for page in pages} == {(1000, 1400)}
    assert len({page.picture.tobytes() for page in pages}) == 6
    tokens = sorted(page.tokens for page in pages)
    assert tokens == [200, 460, 720, 980, 1240, 1500]
    for page in pages:
        ink = 1 - np.asarray(page.picture.convert("L")).mean() / 255
        assert 0.01 < ink < 0.5
    again = documents.make_pages(6, 7, (200, 1500))
    assert [page.picture.tobytes() for page in again] == [
        page.picture.tobytes() for page in pages
    ]


SMALL = ["--pages", "2", "--rounds", "1", "--tokens", "2", "5"]
SMALL += ["--max-pixels", str(64 * 28 * 28)]


def compared(*ways: str) -> tuple[Any, str]:
    """Run the command on small pages; returns its facts, and what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.documents", *SMALL, "--ways", *ways],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def check_ratio(facts: Any, one: str, other: str) -> None:
    (ours,), (theirs,) = facts["runs"][one], facts["runs"][other]
    assert facts["ratios"][f"{one} / {other}"] == {
        "clock": [ours["seconds"] / theirs["seconds"]],
        "processor": [ours["processor_seconds"] / theirs["processor_seconds"]],
    }


def test_the_command_compares_three_ways_on_small_pages() -> None:
    found, said = compared("ours", "page by page", "groups of eight")
    for runs in found["runs"].values():
        (run,) = runs
        assert run["tokens"] == 7 and run["peak_bytes"] > 0
        assert sum(run["parts"].values()) > 0
        assert run["processor_seconds"] > 0
    assert len(found["ratios"]) == 2
    check_ratio(found, "ours", "page by page")
    check_ratio(found, "ours", "groups of eight")
    assert "ours / groups of eight: " in said


@pytest.mark.slow
def test_docling_is_compared_with_itself_and_ours() -> None:
    pytest.importorskip("docling", reason="docling is not installed")
    found, _ = compared("docling", "docling with ours")
    check_ratio(found, "docling with ours", "docling")


def test_docling_is_refused_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(documents, "has_docling", lambda: False)
    assert documents.parse([]).ways == ["ours", "page by page", "groups of eight"]
    with pytest.raises(SystemExit):
        documents.parse(["--ways", "ours", "docling with ours"])
    said = "'docling with ours' needs docling, which is not installed"
    assert said in capsys.readouterr().err
    monkeypatch.setattr(documents, "has_docling", lambda: True)
    assert documents.parse([]).ways == list(documents.WAYS)
