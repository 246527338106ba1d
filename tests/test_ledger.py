"""Where a row is: the ledger's moves, and the two plans of places, on numbers alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from vlm_batch.engine.ledger import BEGINNINGS, COMES_FROM, Ledger
from vlm_batch.engine.row import Prompt, Row, Stage, new_row
from vlm_batch.engine.schedule import (
    Clients,
    DecodePlan,
    DecodeView,
    LiveRow,
    NewRow,
    Prompts,
    PromptsView,
    WaitingRow,
    Yield,
    decode,
    prompts,
)
from vlm_batch.records import Terms
from vlm_batch.types import SamplingParams


def row_of(name: str, urgency: float = 0.0, client: int = 0, n: int = 1) -> Row:
    row = new_row(
        name, Prompt(), SamplingParams(n=n, seed=1), terms=Terms(client=client)
    )
    row.clock.submitted = urgency
    return row


def ledger_of(*rows: Row, stage: Stage = Stage.PREPARED) -> Ledger:
    ledger = Ledger(lambda row: row.clock.submitted)
    for row in rows:
        ledger.add(row, stage)
    return ledger


#: A way to each stage.
WAYS: dict[Stage, tuple[Stage, ...]] = {
    Stage.INBOX: (Stage.INBOX,),
    Stage.READING: (Stage.INBOX, Stage.READING),
    Stage.READ: (Stage.INBOX, Stage.READING, Stage.READ),
    Stage.PROCESSING: (Stage.INBOX, Stage.READING, Stage.READ, Stage.PROCESSING),
    Stage.PREPARED: (Stage.PREPARED,),
    Stage.ENCODED: (Stage.PREPARED, Stage.ENCODED),
    Stage.PREFILL: (Stage.PREPARED, Stage.ENCODED, Stage.PREFILL),
    Stage.READY: (Stage.READY,),
    Stage.DECODE: (Stage.READY, Stage.DECODE),
    Stage.LAST: (Stage.READY, Stage.LAST),
    Stage.ENDED: (Stage.PREPARED, Stage.ENDED),
}


@pytest.mark.parametrize(
    ("here", "there"),
    list(itertools.product(Stage, Stage)),
    ids=lambda stage: stage.value,
)
def test_a_row_moves_where_it_may_and_nowhere_else(here: Stage, there: Stage) -> None:
    row = row_of("a")
    first, *others = WAYS[here]
    ledger = ledger_of(row, stage=first)
    for stage in others:
        ledger.move(row, stage)
    assert row.stage is here
    if here not in COMES_FROM[there]:
        with pytest.raises(RuntimeError, match=f"from {here.value} to {there.value}"):
            ledger.move(row, there)
        assert row.stage is here
        return
    ledger.move(row, there)
    assert row.stage is there
    held = () if there is Stage.ENDED else (row,)
    assert ledger.at(*Stage) == ledger.tuple_at(*Stage) == held
    assert ledger.at(there) == held and ledger.num(*Stage) == len(ledger) == len(held)
    assert ledger.get("a") is (None if there is Stage.ENDED else row)


def test_a_new_row_begins_where_rows_begin_and_once() -> None:
    for stage in set(Stage) - BEGINNINGS:
        with pytest.raises(RuntimeError, match="does not begin"):
            ledger_of(row_of("a"), stage=stage)
    ledger = ledger_of(row_of("a"))
    with pytest.raises(ValueError, match="already in use"):
        ledger.add(row_of("a"), Stage.INBOX)
    with pytest.raises(RuntimeError, match="cannot go"):
        ledger.move(row_of("b"), Stage.READING)  # of no ledger


def test_rows_are_found_by_stage_the_most_urgent_first() -> None:
    rows = [row_of(name, when) for name, when in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
    ledger = ledger_of(*rows)
    a, b, c = rows
    assert ledger.at(Stage.PREPARED) == (b, c, a)
    ledger.move(c, Stage.ENCODED)
    assert ledger.at(Stage.PREPARED) == (b, a)
    assert ledger.at(Stage.ENCODED, Stage.PREPARED) == (c, b, a)
    assert ledger.lines() == {0: [b, c, a]}
    ledger.move(c, Stage.PREFILL)
    assert ledger.placed() == {0: 1}
    ledger.move(c, Stage.READY)
    assert ledger.lines() == {0: [c, b, a]}, "ready rows go first"
    assert not ledger.placed()


def test_the_inbox_has_a_head_for_each_line() -> None:
    rows = [row_of(str(at), float(-at), client=at % 2) for at in range(6)]
    ledger = ledger_of(*rows, stage=Stage.INBOX)
    assert {row.request_id for row in ledger.heads()} == {"4", "5"}
    ledger.move(rows[5], Stage.READING)
    ledger.move(rows[3], Stage.ENDED)
    assert {row.request_id for row in ledger.heads()} == {"4", "1"}
    for row in (rows[0], rows[2], rows[4]):
        ledger.move(row, Stage.ENDED)
    assert [row.request_id for row in ledger.heads()] == ["1"]


def test_answers_are_counted_by_client_until_they_end() -> None:
    one, several = row_of("one", client=1), row_of("several", client=2, n=3)
    ledger = ledger_of(one, several)
    assert ledger.asked == {1: 1, 2: 3}
    siblings, several.siblings = several.siblings, ()
    for sibling in siblings:
        ledger.add(sibling, Stage.READY)
    assert ledger.asked == {1: 1, 2: 3}
    ledger.move(siblings[0], Stage.ENDED)
    ledger.move(one, Stage.ENDED)
    assert ledger.asked == {2: 2}


# The plans


def clients(
    placed: dict[int, int], asked: dict[int, int], now: float = 100.0
) -> Clients:
    return Clients(now, 5.0, Counter(placed), asked, {})


def waiting(name: str, client: int = 1, **how: Any) -> WaitingRow:
    given = {"priority": 0, "submitted": 99.0, "tokens": 10}
    return WaitingRow(name, client, **{**given, **how})


def lines(*rows: WaitingRow) -> dict[int, Sequence[WaitingRow]]:
    found: dict[int, list[WaitingRow]] = {}
    for row in rows:
        found.setdefault(row.client, []).append(row)
    return dict(found)


def within(most: int) -> Any:
    return lambda lengths: sum(lengths) <= most


def live(*names: str, client: int = 1, **how: Any) -> list[LiveRow]:
    return [
        LiveRow(name, client, 0, float(at), 10, **{"may_yield": True, **how})
        for at, name in enumerate(names)
    ]


DECODE = DecodeView(
    clients=clients({1: 3}, {1: 3, 2: 1}),
    lines=lines(waiting("new", 2)),
    live=live("a", "b", "c"),
    held={},
    free=0,
    ahead=2,
    has_grown=False,
    fits=within(10**6),
)


def test_the_last_row_of_who_has_two_places_more_yields() -> None:
    assert decode(DECODE) == DecodePlan(yields=(Yield("c", is_for_due=False),))
    even = replace(DECODE, clients=clients({1: 2, 2: 1}, {1: 3, 2: 2}))
    for other in (
        even,
        replace(DECODE, free=1),
        replace(DECODE, ahead=0),
        replace(DECODE, lines=lines(waiting("new", 2, needs_encoding=True))),
        replace(DECODE, lines=lines(waiting("new", 2, waits=True))),
        replace(DECODE, live=live("a", "b", "c", may_yield=False)),
        replace(DECODE, fits=within(39)),
        replace(DECODE, held={"parked": 10}, fits=within(49)),
    ):
        assert decode(other) == DecodePlan()


def test_for_a_due_client_a_row_of_who_asks_for_more_gives_way_once() -> None:
    due = replace(
        DECODE,
        clients=clients({1: 1, 3: 1}, {1: 4, 3: 1, 2: 1}),
        live=[*live("a"), *live("x", client=3)],
        lines=lines(waiting("new", 2, submitted=90.0)),
    )
    assert decode(due) == DecodePlan(yields=(Yield("a", is_for_due=True),))
    rested = [*live("a", gave_way=True), *live("x", client=3)]
    assert decode(replace(due, live=rested)) == DecodePlan()
    fresh = lines(waiting("new", 2, submitted=96.0))
    assert decode(replace(due, lines=fresh)) == DecodePlan()


#: All places are client 1's and decode; the row of client 2 is to be encoded.
RESTING = replace(
    DECODE,
    clients=clients({1: 3}, {1: 9, 2: 1}),
    lines={},
    new=[NewRow("new", 2, 0)],
    decoding=frozenset({1}),
)


@pytest.mark.parametrize(
    ("how", "resting", "is_still"),
    [
        ({}, {1}, True),
        # they decode now and then; those behind all others do not
        ({"may_be_still": False}, {1}, False),
        ({"decoding": {-1}, "may_be_still": False}, {-1}, True),
        # while its processor runs, they decode, or if nobody does their prompts go on
        ({"new": [NewRow("new", 2, 0, is_coming=True)]}, {1}, False),
        ({"new": [NewRow("new", 2, 0, is_coming=True)], "decoding": ()}, (), False),
        # encoded, it wants a place and memory
        ({"new": [NewRow("new", 2, 0, waits=True, wanted=10)]}, (), False),
        ({"new": [NewRow("new", 2, 0, waits=True, wanted=10)], "free": 1}, {1}, True),
        (
            {
                "new": [NewRow("new", 2, 0, waits=True, wanted=10)],
                "free": 1,
                "fits": within(39),
            },
            (),
            False,
        ),
        (
            {
                "new": [NewRow("new", 2, 0, waits=True, wanted=10)],
                "free": 1,
                "held": {"new": 10},
                "fits": within(40),
            },
            {1},
            True,
        ),
        # no row overtakes one that waits for a place or for memory
        (
            {
                "new": [
                    NewRow("new", 2, 0, waits=True, wanted=10),
                    NewRow("next", 2, 0, waits=True),
                ]
            },
            (),
            False,
        ),
        (
            {
                "new": [
                    NewRow("new", 3, 1, waits=True, wanted=10),
                    NewRow("next", 2, 0, waits=True),
                ]
            },
            {1},
            True,
        ),
        # its client has nearly as many, or gives way itself, or nobody is new
        ({"new": [NewRow("new", 2, 2)]}, (), False),
        ({"new": [NewRow("new", -1, 0)]}, (), False),
        ({"new": []}, (), False),
        # another's row decodes, and all with it; prompts rest
        ({"decoding": {1, 2}}, {1}, False),
        ({"decoding": {1, 3}}, {1}, False),
        ({"decoding": ()}, {1}, True),
    ],
)
def test_who_rests_while_a_row_waits_for_its_first_token(
    how: dict[str, Any], resting: set[int], is_still: bool
) -> None:
    if "decoding" in how:
        how = {**how, "decoding": frozenset(how["decoding"])}
    of = {-1: 3} if how.get("decoding") == {-1} else {1: 3}
    view = replace(RESTING, clients=clients(of, {**of, 2: 1}), **how)
    plan = decode(view)
    assert (plan.resting, plan.is_still) == (frozenset(resting), is_still)


def test_rows_that_outgrew_the_memory_leave_from_the_end_of_the_line() -> None:
    grown = replace(DECODE, has_grown=True, fits=within(15))
    assert decode(grown) == DecodePlan(outgrown=("b", "c"))
    assert decode(replace(grown, has_grown=False, lines={})) == DecodePlan()
    alone = replace(grown, fits=within(9))
    assert decode(alone) == DecodePlan(outgrown=("b", "c"), refused=("a",))


PROMPTS = PromptsView(
    clients=clients({}, {1: 3}),
    lines=lines(waiting("a"), waiting("b"), waiting("c")),
    live=[],
    held={},
    free=2,
    ahead=1,
    most_encoded=lambda pending: 4 if pending < 100 else 0,
    pending=0,
    has_encoded=False,
    may_encode=lambda _: True,
    fits=within(10**6),
)


def test_the_first_in_line_get_the_free_places() -> None:
    assert prompts(PROMPTS) == Prompts(placed=("a", "b"))
    ready = lines(waiting("r", is_ready=True), waiting("b"), waiting("c"))
    assert prompts(replace(PROMPTS, lines=ready)) == Prompts(("b",), ("r",))
    late = lines(waiting("a", waits=True), waiting("b"), waiting("c"))
    assert prompts(replace(PROMPTS, lines=late)) == Prompts(("b", "c"))


def test_nobody_overtakes_a_row_that_memory_has_no_room_for() -> None:
    large = lines(waiting("a", tokens=50), waiting("b", tokens=1))
    tight = replace(PROMPTS, lines=large, live=[10], fits=within(20))
    assert prompts(tight) == Prompts()
    # nobody is there to wait for
    assert prompts(replace(tight, live=[])) == Prompts(("b",), refused=("a",))


def test_what_ready_rows_hold_counts_once() -> None:
    mixed = lines(waiting("r", is_ready=True), waiting("b"))
    view = replace(PROMPTS, lines=mixed, held={"r": 10}, fits=within(20))
    assert prompts(view) == Prompts(("b",), ("r",))
    parked = replace(view, held={"r": 10, "p": 10})
    assert prompts(parked) == Prompts((), ("r",))


@pytest.mark.parametrize("free", [1, 4])
def test_ready_rows_go_before_one_that_memory_has_no_room_for(free: int) -> None:
    """It waits for the memory that they hold: they would wait for each other for ever."""
    ready = waiting("r", 2, is_ready=True)
    new = waiting("b", 1, submitted=90.0)
    view = replace(
        PROMPTS, lines=lines(new, ready), held={"r": 10}, fits=within(19), free=free
    )
    assert prompts(view) == Prompts(joining=("r",))
    # with an encoder that has no room beside others, too
    unread = new._replace(needs_encoding=True)
    tight = replace(view, lines=lines(unread, ready), may_encode=lambda _: False)
    assert prompts(tight) == Prompts(joining=("r",))
    # one that fits nowhere goes on: the next look at memory ends it
    assert prompts(replace(view, fits=within(9))) == Prompts(joining=("r",))
    assert prompts(replace(view, live=[10])) == Prompts()


def test_a_ready_row_leaves_its_place_to_one_before_it_that_is_encoded_first() -> None:
    """Else a client with many further answers would get each place that is free while another's row has none."""
    new = waiting("new", 2, needs_encoding=True, tokens=0)
    ready = [waiting(name, is_ready=True) for name in ("r", "s")]
    view = replace(
        PROMPTS,
        clients=clients({1: 1}, {1: 3, 2: 1}),
        lines=lines(new, *ready),
        live=[10],
        held={"r": 10, "s": 10},
        free=1,
    )
    assert prompts(view) == Prompts(encoded=("new",))
    assert prompts(replace(view, most_encoded=lambda _: 0)) == Prompts()
    encoded = replace(view, lines=lines(new._replace(needs_encoding=False), *ready))
    assert prompts(encoded) == Prompts(("new",))


def test_rows_are_encoded_for_places_and_then_ahead_once_a_step() -> None:
    new = [waiting(name, needs_encoding=True, tokens=0) for name in "abcd"]
    view = replace(PROMPTS, lines=lines(*new))
    assert prompts(view) == Prompts(encoded=("a", "b", "c"))
    assert prompts(replace(view, most_encoded=lambda _: 1)) == Prompts(encoded=("a",))
    assert prompts(replace(view, has_encoded=True)) == Prompts(encoded=("a", "b", "c"))
    # where the encoder has no room, a row is encoded by itself: one that gets its place now is beside it
    tight = replace(view, may_encode=lambda _: False, most_encoded=lambda _: 1)
    assert prompts(tight) == Prompts(encoded=("a",))
    assert prompts(replace(tight, live=[10])) == Prompts()
    assert prompts(replace(tight, held={"p": 10})) == Prompts()
    placed = replace(tight, lines=lines(waiting("x"), *new))
    assert prompts(placed) == Prompts(("x",))
    full = replace(view, free=0)
    assert prompts(full) == Prompts(encoded=("a",))
    assert prompts(replace(full, has_encoded=True)) == Prompts()
    # what was placed in this very plan counts as pending
    long = lines(waiting("x", pending=100), *new)
    assert prompts(replace(view, lines=long)) == Prompts(("x",))
    # none goes before one that is to be encoded
    first = lines(waiting("a", needs_encoding=True), waiting("b"))
    assert prompts(replace(PROMPTS, lines=first, most_encoded=lambda _: 0)) == Prompts()
