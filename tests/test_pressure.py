"""A system that runs out of memory, simulated: it falls, stays and recovers; every request is answered as alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.harness import inputs_of, settings_for, shared_adapter
from vlm_batch import VLMBatcher
from vlm_batch.arrays import as_mlx
from vlm_batch.assets import default_checkpoint
from vlm_batch.caches import Placement
from vlm_batch.engine import pressure
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.reuse import Reuse
from vlm_batch.runtime import available
from vlm_batch.runtime.available import Available, of_linux, of_macos
from vlm_batch.store.budget import ByteBudget
from vlm_batch.types import SamplingParams

MB = 1 << 20
TOTAL = 16_000 * MB
NUM_ROWS, NUM_TOKENS = 8, 24


@dataclass
class System:
    """The memory that other programs leave, as the guard reads it. Each step of the engine takes a second."""

    left: Callable[[int], Available | None]
    seconds: int = 0
    num_reads: int = 0

    def read(self) -> Available | None:
        self.num_reads += 1
        return self.left(self.seconds)


@dataclass
class Run:
    """What became of the requests, and how many rows lived at each second."""

    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    live: list[int] = field(default_factory=list)
    pressed: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    recomputed: int = 0


def play(system: System, placement: Placement, *, num_rows: int = NUM_ROWS) -> Run:
    adapter = shared_adapter("qwen2_vl")
    kept = ByteBudget(2**24)
    engine = BatchGenerator(
        adapter,
        policy=settings_for(placement, max_rows=num_rows),
        reuse=Reuse(adapter, budget=kept),
    )
    kept.add("of an earlier request", 1000, lambda: None)
    engine.guard.read, engine.guard.clock = system.read, lambda: float(system.seconds)
    for number in range(num_rows):
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        inputs = as_mlx(inputs_of("qwen2_vl", f"image:{number}:0"))
        engine.insert(str(number), inputs, params)
    run = Run()
    while engine.has_work:
        system.seconds += 1
        assert system.seconds < 2000, "the engine is wedged"
        for event in engine.step():
            if event.result is not None:
                assert event.result.error is None, event.result.error
                run.tokens[event.request_id] = event.result.token_ids
        run.live.append(len(engine.rows.live()))
        run.pressed.append(engine.guard.pressed)
        run.cached.append(kept.nbytes)
    run.recomputed = engine.retry.num_recomputed
    assert len(run.tokens) == num_rows
    return run


def enough(second: int) -> Available:
    return Available(8_000 * MB, TOTAL)


def short(second: int) -> Available:
    return Available(100 * MB, TOTAL)


@pytest.fixture(params=list(Placement), ids=lambda placement: placement.name.lower())
def placement(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_with_memory_nothing_changes(placement: Placement) -> None:
    system = System(enough)
    run = play(system, placement)
    assert max(run.live) == NUM_ROWS
    assert (set(run.pressed), set(run.cached), run.recomputed) == ({0.0}, {1000}, 0)
    assert system.num_reads > 10, "the figures are not fresh"


def test_memory_falls_stays_and_comes_back(
    placement: Placement, caplog: pytest.LogCaptureFixture
) -> None:
    right = play(System(enough), placement).tokens
    low = range(6, 14)

    def left(second: int) -> Available:
        return short(second) if second in low else enough(second)

    with caplog.at_level(logging.WARNING, "vlm_batch.engine.pressure"):
        run = play(System(left), placement)
    assert run.tokens == right
    assert run.live[4] == NUM_ROWS
    assert run.live[low[-1] - 1] == 1, "rows still live beside the one that goes on"
    assert max(run.live[low[-1] :]) == NUM_ROWS, "rows did not come back"
    assert run.recomputed >= NUM_ROWS - 1
    assert run.cached[4] == 1000
    assert run.cached[-1] == 0
    assert run.pressed[low[-1] - 1] == len(low) - 1
    assert run.pressed[-1] == 0
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, said
    assert "is short of memory: 0.1 of 16.8 GB are free" in said[0]
    assert "has memory again" in said[1]


def test_memory_that_stays_short_wedges_nobody(placement: Placement) -> None:
    right = play(System(enough), placement).tokens
    run = play(System(short), placement)
    assert run.tokens == right
    assert run.live[-2] == 1
    assert run.pressed[-1] > NUM_TOKENS


def test_between_little_and_enough_nothing_moves(placement: Placement) -> None:
    """Below the least share rows leave; they come back at half as much again, not at once."""
    least = 0.05 * TOTAL

    def left(second: int) -> Available:
        if second < 5:
            return enough(second)
        return Available(int((0.9 if second < 6 else 1.2) * least), TOTAL)

    run = play(System(left), placement)
    assert run.pressed[-1] > 0
    assert run.recomputed == 0, "one look gives memory back, and ends no row's work"


def test_a_system_that_ends_programs_is_short_of_memory(placement: Placement) -> None:
    run = play(
        System(lambda second: Available(8_000 * MB, TOTAL, is_critical=True)), placement
    )
    assert run.pressed[-1] > 0


def test_unknown_figures_change_nothing(placement: Placement) -> None:
    run = play(System(lambda second: None), placement)
    assert set(run.pressed) == {0.0}


def test_a_row_that_could_not_begin_again_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its inputs are too large to keep."""
    monkeypatch.setattr("vlm_batch.engine.row.MOST_ON_HOST", 0)
    run = play(System(short), Placement.ROWS)
    assert run.recomputed == 0


def test_free_memory_is_not_given_back_at_every_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[int] = []
    monkeypatch.setattr(pressure, "release_memory", lambda: given.append(1))
    run = play(System(short), Placement.ROWS)
    assert 3 <= len(given) <= 5 + len(run.live) // pressure.RETURNS


def test_the_setting_turns_it_off_and_the_counters_tell() -> None:
    with VLMBatcher(default_checkpoint(), policy={"least_free": 0}) as batcher:
        guard = batcher._loop.generator.guard
        guard.read = lambda: short(0)
        assert batcher.submit(prompt="count to 3").result(timeout=60).text == "1 2 3"
        assert batcher.stats().pressed == 0
    with VLMBatcher(default_checkpoint()) as batcher:
        batcher._loop.generator.guard.read = lambda: short(0)
        assert batcher.submit(prompt="count to 9").result(timeout=60).ok
        assert batcher.stats().pressed > 0
    with pytest.raises(ValueError, match="least_free"):
        VLMBatcher(default_checkpoint(), policy={"least_free": 1})


# What the systems tell
# ---------------------------------------------------------------------------------------------------------------------


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    return root


MEMINFO = {
    "proc/meminfo": "MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\n"
}


@pytest.mark.parametrize(
    ("files", "right"),
    [
        ({}, (600 * 1024, 1000 * 1024)),
        (
            {
                "sys/fs/cgroup/memory.max": "512000\n",
                "sys/fs/cgroup/memory.current": "500000\n",
                "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 88000\n",
            },
            (100_000, 512_000),
        ),
        (
            {
                "sys/fs/cgroup/memory.max": "max\n",
                "sys/fs/cgroup/memory.current": "500000\n",
                "sys/fs/cgroup/memory.stat": "inactive_file 88000\n",
            },
            (600 * 1024, 1000 * 1024),
        ),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "512000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "512000\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
            },
            (0, 512_000),
        ),
    ],
    ids=["machine", "container", "container without a limit", "older container"],
)
def test_linux(tmp_path: Path, files: dict[str, str], right: tuple[int, int]) -> None:
    found = of_linux(write(tmp_path, {**MEMINFO, **files}))
    assert (found.nbytes, found.total) == right


@pytest.mark.parametrize(
    ("level", "is_critical"), [(1, False), (2, False), (4, True)], ids=str
)
def test_macos(level: int, is_critical: bool) -> None:
    told = {
        ("hw.memsize", 8): 16_000,
        ("kern.memorystatus_level", 4): 25,
        ("kern.memorystatus_vm_pressure_level", 4): level,
    }
    found = of_macos(lambda name, size: told[name, size])
    assert found == Available(4_000, 16_000, is_critical)
    assert found.has(4_000) is not is_critical


def test_this_machine_tells() -> None:
    found = available.available()
    assert found is None or 0 < found.nbytes <= found.total


def test_a_system_that_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(available, "ROOT", tmp_path)
    monkeypatch.setattr(available.sys, "platform", "linux")
    assert available.available() is None
    monkeypatch.setattr(available.sys, "platform", "win32")
    assert available.available() is None
