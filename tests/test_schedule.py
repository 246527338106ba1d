"""The plan of a step: budgets, atomic spans, priorities, ageing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from vlm_batch.engine.lengths import chunk_end, together
from vlm_batch.engine.pace import Pace
from vlm_batch.engine.schedule import Clients, PrefillRow, chunks, in_turn
from vlm_batch.engine.work import Work
from vlm_batch.policy import Policy


def chunk_of(name: str, begin: int, end: int) -> Work:
    return Work((name,), begin, end)


POLICY = Policy(max_rows=4, prefill_budget=10, idle_budget=100, ageing_seconds=5)


def plan(
    rows: Sequence[PrefillRow], budget: int, policy: Policy = POLICY
) -> tuple[Work, ...]:
    return chunks(rows, budget, policy)


def clients(
    placed: dict[int, int] | None = None,
    asked: dict[int, int] | None = None,
    served: dict[int, float] | None = None,
    now: float = 0.0,
) -> Clients:
    return Clients(now, 5.0, Counter(placed), asked or {}, served or {})


def chunks_of(row: PrefillRow, budget: int) -> list[tuple[int, int]]:
    found, done = [], row.done
    while done < row.length:
        end = chunk_end(done, row.length, budget, row.atomic)
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
    assert plan(rows, 10) == (chunk_of("a", 0, 10),)
    assert plan(rows, 100) == (chunk_of("a", 0, 50), chunk_of("b", 0, 50))


def test_what_the_first_row_leaves_of_the_budget_goes_to_the_next() -> None:
    rows = [PrefillRow("a", 6, 0), PrefillRow("b", 50, 8)]
    assert plan(rows, 10) == (chunk_of("a", 0, 6), chunk_of("b", 8, 12))


def test_short_prompts_go_before_long_ones_that_have_waited_as_long() -> None:
    rows = [
        PrefillRow("long", 50, 0, waited=1.0),
        PrefillRow("short", 6, 0, waited=0.9),
    ]
    assert plan(rows, 10) == (chunk_of("short", 0, 6), chunk_of("long", 0, 4))


def test_what_is_left_of_a_prompt_counts() -> None:
    rows = [
        PrefillRow("fresh", 20, 0, waited=1.0),
        PrefillRow("begun", 50, 40, waited=1.0),
    ]
    assert plan(rows, 10) == (chunk_of("begun", 40, 50),)


def test_a_long_prompt_is_not_kept_waiting_by_short_ones_that_keep_coming() -> None:
    """One of 30 tokens comes each second, as fast as they are prefilled; the long one's turn comes within a minute."""
    patient = Policy(ageing_seconds=1000.0)
    long, waiting = PrefillRow("long", 300, 0), []
    for second in range(60):
        waiting.append((f"short-{second}", second))
        rows = [replace(long, waited=float(second))]
        rows += [
            PrefillRow(name, 30, 0, waited=float(second - came))
            for name, came in waiting
        ]
        (chunk,) = plan(rows, 30, patient)[:1]
        if chunk.rows[0] == "long":
            long = replace(long, done=chunk.end)
            if long.done == long.length:
                return
        else:
            waiting = [item for item in waiting if item[0] != chunk.rows[0]]
    raise AssertionError(
        f"{long.length - long.done} tokens of the long prompt are left"
    )


def test_priority_and_its_ageing_rule_over_length() -> None:
    rows = [
        PrefillRow("short", 5, 0, waited=1.0),
        PrefillRow("urgent", 50, 0, priority=1),
    ]
    assert plan(rows, 10) == (chunk_of("urgent", 0, 10),)
    rows = [
        PrefillRow("short", 5, 0, waited=4.0),
        PrefillRow("aged", 50, 0, waited=5.5),
    ]
    assert plan(rows, 10) == (chunk_of("aged", 0, 10),)


def test_nothing_to_prefill_is_an_empty_plan() -> None:
    assert plan([], 10) == ()


@pytest.mark.parametrize("budget", [0, 7])
def test_a_prompt_that_was_found_whole_waits_for_no_budget(budget: int) -> None:
    """Where decoding alone takes longer than the gap between tokens may, a step has no room for prefill."""
    found, rest = PrefillRow("found", 40, 40), PrefillRow("rest", 7, 0)
    chunks = (chunk_of("rest", 0, 7),) if budget else ()
    assert set(plan([rest, found], budget)) == {
        chunk_of("found", 40, 40),
        *chunks,
    }


def test_rows_wait_by_priority_then_age() -> None:
    old, new, urgent = (0, 10.0), (0, 12.0), (2, 13.0)  # priority, and when they came
    assert sorted([old, new, urgent], key=lambda row: clients().urgency(*row)) == [
        urgent,
        old,
        new,
    ]


def test_waiting_lifts_a_row_over_any_priority() -> None:
    urgent, patient = (2, 16.0), (0, 0.0)
    assert clients().urgency(*patient) < clients().urgency(*urgent)


def test_clients_get_places_by_turns() -> None:
    """Whoever has the fewest is next, whatever others have asked for, and within a client the most urgent."""

    def line(rows: list[tuple[int, float]], placed: dict[int, int]) -> list[int]:
        lines: dict[int, list[int]] = {}
        for at in sorted(range(len(rows)), key=lambda at: rows[at][1]):
            lines.setdefault(rows[at][0], []).append(at)
        return list(in_turn(lines, lambda at: rows[at][1], placed))

    many = [(1, float(at)) for at in range(6)]
    assert line([*many, (2, 50.0), (2, 40.0), (3, 60.0)], {}) == [
        0,
        7,
        8,
        1,
        6,
        2,
        3,
        4,
        5,
    ]
    assert line([*many[:2], (2, 50.0)], {1: 2}) == [2, 0, 1]
    # alone: as it always was
    assert line([(1, 3.0), (1, 1.0), (1, 1.0)], {1: 9}) == [1, 2, 0]
    assert line([], {1: 1}) == []
    # of equals who was given a place longest ago, whatever goes first among a client's own
    turns = {"b": 9.0, "a": 9.0, "c": 5.0}
    assert list(in_turn({1: "ba", 2: "c"}, turns.__getitem__, {})) == ["c", "b", "a"]


def test_who_has_most_places_gives_them_up_until_they_are_even() -> None:
    placed = {1: 14, 2: 2}
    given = 0
    while (giver := clients(placed).giver(3)) is not None:
        assert giver == 1
        placed[1], placed[3], given = placed[1] - 1, placed.get(3, 0) + 1, given + 1
    assert placed == {1: 8, 2: 2, 3: 7} or placed == {1: 7, 2: 2, 3: 7}
    assert clients({1: 1, 2: 1}).giver(3) is None and clients().giver(3) is None
    assert clients({1: 5}).giver(1) is None
    # negative numbers get what no other wants
    assert clients({-1: 1, 1: 5}).giver(2) == clients({-1: 1}).giver(1) == -1
    assert clients({1: 5}).giver(-1) is None and clients({-1: 5}).giver(-2) == -1
    assert clients({-1: 0, 1: 1}).giver(2) is None
    lines = {-1: [3, 4], 1: [1, 2]}
    assert list(in_turn(lines, lambda row: -row, {1: 3})) == [1, 2, 3, 4]


def test_the_prompts_of_one_client_do_not_keep_anothers_waiting() -> None:
    rows = [PrefillRow(f"many {at}", 100, 0, waited=9.0, client=1) for at in range(5)]
    found = plan([*rows, PrefillRow("one", 100, 0, client=2)], 100)
    assert found[0].rows == ("one",)


def test_a_chunk_is_bounded_whatever_the_budget() -> None:
    policy = Policy(max_chunk=20)
    assert plan([PrefillRow("a", 30, 0), PrefillRow("b", 50, 0)], 45, policy) == (
        chunk_of("a", 0, 20),
        chunk_of("a", 20, 30),
        chunk_of("b", 0, 15),
    )


def test_a_prompt_that_was_found_whole_has_an_empty_chunk() -> None:
    assert plan([PrefillRow("a", 50, 50), PrefillRow("b", 4, 0)], 10) == (
        chunk_of("a", 50, 50),
        chunk_of("b", 0, 4),
    )


def test_a_budget_of_several_chunks_goes_to_one_row_if_it_is_alone() -> None:
    policy = Policy(max_chunk=20)
    row = PrefillRow("a", 50, 4, atomic=((22, 30),))
    assert plan([row], 30, policy) == (chunk_of("a", 4, 22), chunk_of("a", 22, 34))


def test_a_fixed_budget_holds_beside_decoding_rows_only() -> None:
    pace = Pace(Policy(prefill_budget=10, idle_budget=100))
    pace.record(0.01, 50)
    assert pace.budget(is_decoding=True, pending=4096) == 10
    assert pace.budget(is_decoding=False, pending=4096) == 100


def measured(decode: float, prefill: float, tokens: int) -> Pace:
    """After steps of decoding alone, and steps that launch ``tokens`` which are waited for in this step or the next."""
    pace = Pace(
        Policy(token_gap=0.1, encode_seconds=0.0, smallest_chunk=64, idle_budget=2048)
    )
    assert pace.budget(is_decoding=True, pending=4096) == Pace.FIRST_CHUNK
    # a CPU works while it is launched, a GPU while the next step waits
    for here in (1.0, 0.0):
        for _ in range(30):
            pace.record(decode, 0)
        for _ in range(30):
            pace.record(decode + here * prefill, tokens)
            pace.record(decode + (1 - here) * prefill, 0)
    return pace


def test_a_budget_in_time_follows_what_is_measured() -> None:
    """0.1 s between tokens, of which decoding takes 0.04: 0.06 s at 2,000 tokens/s are 120 tokens."""
    assert measured(0.04, 0.1, 200).budget(
        is_decoding=True, pending=4096
    ) == pytest.approx(120, abs=2)
    # progress, however slow decoding is
    slow = [measured(0.2, 0.1, 200)] * Pace.LONGEST_SAVING
    assert [pace.budget(is_decoding=True, pending=4096) for pace in slow] == [
        0,
        0,
        0,
        64,
    ]
    assert measured(0.001, 0.0001, 200).budget(is_decoding=True, pending=4096) == 2048


def test_what_fits_is_saved_up_for_a_chunk_that_is_worth_it() -> None:
    """120 tokens fit beside each step: 256 after three, the end of a prompt at once."""
    pace = measured(0.04, 0.1, 200)
    pace._config = Policy(token_gap=0.1, idle_budget=2048, smallest_chunk=256)
    assert [pace.budget(is_decoding=True, pending=4096) for _ in range(3)] == [
        0,
        0,
        pytest.approx(360, abs=6),
    ]
    assert pace.budget(is_decoding=True, pending=100) == pytest.approx(120, abs=2)


def test_a_prompt_that_has_waited_long_may_stretch_the_gap() -> None:
    """0.1 s and 120 tokens (above); 0.15 s leave room for 220 after 0.75 s, and 0.2 s for 320 from 1 s on."""
    pace = measured(0.04, 0.1, 200)
    budgets = [
        pace.budget(is_decoding=True, pending=4096, waited=waited)
        for waited in (0.45, 0.75, 1.0, 60.0)
    ]
    assert budgets == pytest.approx([120, 220, 320, 320], abs=6)


def test_how_far_it_is_stretched_is_the_devices() -> None:
    pace = measured(0.04, 0.1, 200)
    pace._config = Policy(token_gap=0.1, smallest_chunk=64, idle_budget=2048, stretch=1)
    assert pace.budget(is_decoding=True, pending=4096, waited=60.0) == pytest.approx(
        120, abs=3
    )


def test_what_pictures_took_of_a_step_is_not_left_for_prompts() -> None:
    """0.06 s beside decoding, less 0.04 for a picture: 40 tokens, and none where it took longer."""
    pace = measured(0.04, 0.1, 200)
    budgets = [
        pace.budget(is_decoding=True, pending=30, encoding=encoding)
        for encoding in (0.04, 0.2, 0.2, 0.0)
    ]
    assert budgets == [pytest.approx(40, abs=2), 0, 0, pytest.approx(3 * 120, abs=6)]


def test_a_chunk_ends_its_prompt_within_the_slack() -> None:
    policy = Policy(slack=30)
    rows = [PrefillRow("a", 50, 0), PrefillRow("b", 50, 0), PrefillRow("c", 50, 0)]
    assert plan(rows, 70, policy) == (chunk_of("a", 0, 50), chunk_of("b", 0, 50))
    assert plan(rows, 60, policy) == (chunk_of("a", 0, 50), chunk_of("b", 0, 10))


def test_prompts_of_one_length_go_together() -> None:
    assert together([50, 50, 50, 40, 60], 2, 1000, 0, 0) == [[0, 1], [2], [3], [4]]


def test_a_group_of_prompts_has_a_limit_in_tokens() -> None:
    assert [len(group) for group in together([40] * 5, 8, 100, 0, 0)] == [2, 2, 1]
    assert [len(group) for group in together([40] * 5, 8, 10, 0, 0)] == [1] * 5


@pytest.mark.parametrize(("seconds", "budget"), [(0.1, 1024), (1.0, 600), (10.0, 256)])
def test_a_step_in_which_nothing_decodes_takes_two_seconds_or_a_chunk(
    seconds: float, budget: int
) -> None:
    pace = Pace(Policy(idle_budget=1024))
    assert pace.budget(is_decoding=False, pending=5000) == 1024, "nothing was measured"
    for tokens in [0] * 30 + [300, 0] * 40:
        pace.record(0.04 + (seconds if tokens else 0.0), tokens)
    assert pace.budget(is_decoding=False, pending=5000) == pytest.approx(
        budget, rel=0.02
    )


def test_a_few_tokens_that_seem_to_take_no_time_change_no_budget() -> None:
    """A step is quicker than the usual ones by chance, and slower: what a few tokens took beside it tells little."""
    pace = measured(0.04, 0.1, 200)
    for seconds in (0.03, 0.03, 0.06):
        pace.record(seconds, 4)
        pace.record(0.04, 0)
    assert pace.budget(is_decoding=True, pending=4096) == pytest.approx(120, rel=0.3)


def test_options_share_the_time_of_prompts() -> None:
    """They have what one step leaves, and prompts what they leave of several."""
    pace = measured(0.04, 0.1, 200)
    assert pace.room_ahead(is_decoding=True) == pytest.approx(120, abs=2)
    assert pace.room_ahead(is_decoding=False) == 2048
    for _ in range(Pace.LONGEST_SAVING - 1):
        pace.note_ahead(100)
        assert pace.room_ahead(is_decoding=True) == pytest.approx(20, abs=2)
        assert pace.budget(is_decoding=True, pending=4096) in (0, 64)
        assert pace.end_step() == 100
    assert pace.room_ahead(is_decoding=True) == pytest.approx(120, abs=2)
    assert measured(0.2, 0.1, 200).room_ahead(is_decoding=True) == 4
    fixed = Pace(Policy(prefill_budget=10, idle_budget=100))
    fixed.note_ahead(4)
    assert fixed.room_ahead(is_decoding=True) == 1
    assert fixed.budget(is_decoding=True, pending=4096) == 6


@pytest.mark.parametrize("budget", [None, 1, 2, 9])
def test_options_leave_prompts_a_part_of_every_few_steps(budget: int | None) -> None:
    """However many tokens they have to say: a prompt beside them is never kept waiting for all of these."""
    pace = Pace(Policy(prefill_budget=budget, smallest_chunk=64))
    pace.record(0.04, 0)
    given = 0
    for _ in range(2 * Pace.LONGEST_SAVING):
        pace.note_ahead(pace.room_ahead(is_decoding=True))
        given += pace.budget(is_decoding=True, pending=4096)
        pace.record(0.2, pace.end_step())
    assert given >= 2 * min(budget or 64, 64)


def test_a_first_prompt_that_seems_to_take_no_time_tells_nothing() -> None:
    pace = Pace(Policy(token_gap=0.1, idle_budget=2048))
    pace.record(0.04, 0)
    pace.record(0.03, 4)
    pace.record(0.04, 0)
    assert pace.budget(is_decoding=True, pending=4096) == Pace.FIRST_CHUNK
    # what is measured then counts at once
    pace.record(0.14, 200)
    pace.record(0.04, 0)
    assert pace.room_ahead(is_decoding=True) == pytest.approx(120, rel=0.2)


def test_prompts_without_a_break_are_measured_too() -> None:
    pace = Pace(
        Policy(token_gap=0.1, encode_seconds=0.0, smallest_chunk=64, idle_budget=2048)
    )
    for _ in range(30):
        pace.record(0.04, 0)
    for _ in range(80):
        pace.record(0.14, 200)
    assert pace.budget(is_decoding=True, pending=4096) == pytest.approx(120, abs=2)
