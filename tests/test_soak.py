"""The short form of ``python -m tests.soak``: nothing lost, mixed up or leaked within half a minute."""

from __future__ import annotations

import sys

import pytest

from tests.soak import growth, soak


@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc")
def test_nothing_is_lost_mixed_up_or_leaked() -> None:
    samples, ends, wrong = soak(seconds=20, every=1.0)
    assert not wrong
    assert ends["stop"] and ends["error"] and ends["cancelled"]
    assert not growth(samples)
