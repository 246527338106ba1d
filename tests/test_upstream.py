"""mlx-vlm still has the defects that docs/upstream.md reports, and that the adapters mend."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.upstream_page import (
    DOCS,
    NOT_SHOWN,
    cases,
    is_shown,
    places_of_notes,
    render,
    shows,
)
from vlm_batch import families

CASES = cases()
SPEC = find_spec("mlx_vlm")
assert SPEC is not None and SPEC.origin is not None
MLX_VLM = Path(SPEC.origin).parent


@pytest.mark.parametrize(
    "one", CASES, ids=[f"{one.run.__module__}-{one.name}" for one in CASES]
)
def test_mlx_vlm_still_shows_it(one: Any) -> None:
    found, right = one.run()
    assert shows(found, right), (
        f"mlx-vlm {version('mlx-vlm')} is right about {one.name}: drop the case, and the mend of {', '.join(one.families)}"
    )


def test_the_page_is_up_to_date() -> None:
    assert (DOCS / "upstream.md").read_text(encoding="utf-8") == render(), (
        "run python -m tests.upstream_page"
    )


@pytest.mark.skipif(
    version("mlx-vlm") != "0.7.10", reason="places are lines of mlx-vlm 0.7.10"
)
def test_places_are_lines_of_mlx_vlm() -> None:
    for one in CASES:
        for place in one.places:
            file, _, line = place.rpartition(":")
            lines = (MLX_VLM / file).read_text(encoding="utf-8").splitlines()
            assert lines[int(line) - 1].strip(), f"{one.name}: {place} is an empty line"


def test_every_place_that_a_note_names_is_shown() -> None:
    """What a note says of mlx-vlm (file.py:line) has a reproduction that names that part of the file, or a reason for none."""
    missing = {
        place
        for spec in families()
        for place in places_of_notes(spec.notes)
        if not is_shown(place)
    }
    assert missing == NOT_SHOWN.keys()
