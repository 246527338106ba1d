"""The process's memory: what a Mac keeps resident while engines run; want of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from vlm_batch import VLMBatcher, assets
from vlm_batch.runtime.memory import wired

RECOMMENDED = 12_000


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limits that were set, of a Mac whose first one is 7."""
    held = [7]

    def put(limit: int) -> int:
        held.append(limit)
        return held[-2]

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(
        mx, "device_info", lambda: {"max_recommended_working_set_size": RECOMMENDED}
    )
    monkeypatch.setattr(mx, "set_wired_limit", put)
    return held


def test_the_last_engine_puts_back_what_the_first_found(limits: list[int]) -> None:
    first, second = wired(), wired()
    first.__enter__()
    second.__enter__()
    assert limits[-1] == RECOMMENDED
    first.__exit__(None, None, None)  # in whatever order they end
    assert limits[-1] == RECOMMENDED
    second.__exit__(None, None, None)
    assert limits[-1] == 7


def test_a_mac_without_such_a_limit_goes_on_as_it_is(
    limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(limit: int) -> int:
        raise ValueError(
            "Setting a wired limit larger than the maximum working set size is not allowed."
        )

    monkeypatch.setattr(mx, "set_wired_limit", refuses)
    with wired():
        pass
    assert limits == [7]


def test_a_batcher_keeps_its_model_resident_until_it_is_closed(
    limits: list[int],
) -> None:
    with VLMBatcher(assets.default_checkpoint(), max_bytes=10**9) as own:
        assert own.submit(None, "count to 3").result(timeout=60).ok
        assert limits[-1] == RECOMMENDED
    assert limits[-1] == 7


def test_want_of_memory_as_the_command_brings_it_about() -> None:
    """In a process of its own: what is held is compared with what was held before."""
    command = [sys.executable, "-m", "tests.out_of_memory", "--pretend"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("8 of 8 have the tokens that they have without want") == 2
