"""The plan of a step: budgets, atomic spans, priorities, ageing."""

from __future__ import annotations

import pytest

from vlm_batch.scheduler import Pace, PrefillRow, Scheduler, SchedulerConfig, WaitingRow, chunk_end
from vlm_batch.types import Chunk

SCHEDULER = Scheduler(SchedulerConfig(max_rows=4, prefill_budget=10, idle_budget=100, ageing_seconds=5))


def chunks_of(row: PrefillRow, budget: int) -> list[tuple[int, int]]:
    found, done = [], row.done
    while done < row.length:
        end = chunk_end(PrefillRow(row.request_id, row.length, done, row.atomic), budget)
        assert end > done
        found.append((done, end))
        done = end
    return found


@pytest.mark.parametrize("budget", range(1, 40))
def test_chunks_never_cut_an_atomic_span_and_cover_the_prompt(budget: int) -> None:
    atomic = ((3, 9), (9, 12), (20, 31))
    chunks = chunks_of(PrefillRow("a", 33, 0, atomic), budget)
    assert [start for start, _ in chunks[1:]] == [end for _, end in chunks[:-1]]
    assert chunks[0][0] == 0
    assert chunks[-1][1] == 33
    ends = {end for _, end in chunks}
    assert not any(start < end < stop for start, stop in atomic for end in ends)
    for start, end in chunks:
        if end - start > budget:  # only to hold a span whole
            assert (start, end) in atomic


def test_the_budget_goes_to_the_oldest_row_first() -> None:
    rows = [PrefillRow("a", 50, 0), PrefillRow("b", 50, 0)]
    assert SCHEDULER.plan(rows, 10) == (Chunk("a", 0, 10),)
    assert SCHEDULER.plan(rows, 100) == (Chunk("a", 0, 50), Chunk("b", 0, 50))


def test_what_the_first_row_leaves_of_the_budget_goes_to_the_next() -> None:
    rows = [PrefillRow("a", 6, 0), PrefillRow("b", 50, 8)]
    assert SCHEDULER.plan(rows, 10) == (Chunk("a", 0, 6), Chunk("b", 8, 12))


def test_nothing_to_prefill_is_an_empty_plan() -> None:
    assert SCHEDULER.plan([], 10) == ()


def test_rows_wait_by_priority_then_age() -> None:
    waiting = [WaitingRow("old", 0, 3.0), WaitingRow("new", 0, 1.0), WaitingRow("urgent", 2, 0.0)]
    assert SCHEDULER.order(waiting) == ["urgent", "old", "new"]


def test_waiting_lifts_a_row_over_any_priority() -> None:
    assert SCHEDULER.order([WaitingRow("urgent", 2, 0.0), WaitingRow("patient", 0, 16.0)]) == ["patient", "urgent"]


def test_places_are_bounded() -> None:
    assert [SCHEDULER.num_free(live) for live in (0, 3, 4, 5)] == [4, 1, 0, 0]


def test_a_fixed_budget_holds_beside_decoding_rows_only() -> None:
    pace = Pace(SchedulerConfig(prefill_budget=10, idle_budget=100))
    pace.record(0.01, 50, 0.5)
    assert pace.budget(is_decoding=True) == 10
    assert pace.budget(is_decoding=False) == 100


def test_a_budget_in_time_follows_what_is_measured() -> None:
    """0.1 s between tokens, of which decoding takes 0.04: 0.06 s at 2,000 tokens/s are 120 tokens."""
    pace = Pace(SchedulerConfig(token_gap=0.1, idle_budget=2048))
    assert pace.budget(is_decoding=True) == Pace.FIRST_CHUNK
    for _ in range(30):
        pace.record(0.04, 200, 0.1)
    assert pace.budget(is_decoding=True) == pytest.approx(120, abs=1)
    for _ in range(30):
        pace.record(0.2, 200, 0.1)
    assert pace.budget(is_decoding=True) == Pace.SMALLEST_CHUNK  # progress, however slow decoding is
    for _ in range(30):
        pace.record(0.001, 200, 0.0001)
    assert pace.budget(is_decoding=True) == 2048
