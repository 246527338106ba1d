"""The benchmark of pages an hour: its pages, and its table of small ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

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


def test_the_command_compares_three_ways_on_small_pages() -> None:
    arguments = ["--pages", "2", "--rounds", "1", "--tokens", "2", "5"]
    arguments += ["--max-pixels", str(64 * 28 * 28)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.documents", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["runs"].keys() == documents.WAYS.keys()
    for runs in found["runs"].values():
        (run,) = runs
        assert run["tokens"] == 7 and run["peak_bytes"] > 0
        assert sum(run["parts"].values()) > 0
    for other, ratios in found["ratios"].items():
        ours, theirs = found["runs"]["ours"][0], found["runs"][other][0]
        assert ratios == [ours["seconds"] / theirs["seconds"]]
    assert "ours / groups of eight: " in done.stdout
