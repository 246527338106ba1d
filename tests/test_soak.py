"""The short form of ``python -m tests.soak``: nothing lost, mixed up or leaked within half a minute."""

from __future__ import annotations

import sys

import pytest

from tests.soak import Sample, growth, soak


@pytest.mark.skipif(
    sys.platform != "linux", reason="what a process holds is read from /proc"
)
def test_nothing_is_lost_mixed_up_or_leaked() -> None:
    samples, ends, wrong = soak(seconds=20, every=1.0)
    assert not wrong
    assert ends["stop"] and ends["error"] and ends["cancelled"]
    assert not growth(samples)


def held(files: list[int]) -> list[Sample]:
    """Samples of a process with so many open files."""
    rest = {
        "requests": 0,
        "rss": 0,
        "mlx_active": 0,
        "mlx_cache": 0,
        "arrays": 0,
        "threads": 9,
    }
    return [
        Sample(seconds=float(at), files=count, **rest) for at, count in enumerate(files)
    ]


def test_what_stays_open_is_a_leak_and_what_is_read_is_none() -> None:
    assert not growth(held([14, 15, 14, 14, 15, 14, 18, 14, 16]))
    assert growth(held([14, 15, 14, 14, 15, 16, 17, 18, 19])) == [
        "files grew from 14 to 17"
    ]
