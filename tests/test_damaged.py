"""Damaged pictures, videos, saved caches and odd texts: refused with a reason, or right; never a crash, a hang or a flood."""

from __future__ import annotations

import pytest

from tests.damaged import FORMATS, summary


@pytest.mark.parametrize(("kind", "count"), [("pictures", 400), ("videos", 60)])
def test_damaged_files_are_decoded_or_refused(kind: str, count: int) -> None:
    """``python -m tests.damaged`` reads 10,000 and 1,000."""
    found, wrong, _, _ = summary(kind, 0, count)
    assert not wrong
    assert sum(found.values()) == count
    for form in FORMATS if kind == "pictures" else ("MP4",):
        assert found[f"{form}: refused"] or found[f"{form}: not built in"]
        assert found[f"{form}: decoded"] or found[f"{form}: not built in"]
