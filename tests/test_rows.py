"""The number of rows that live follows what a step takes for each, and changes no answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from tests.harness import (
    NUM_TOKENS,
    Ask,
    check,
    inputs_of,
    oracle,
    run_family,
    settings_for,
    shared_adapter,
)
from tests.zoo import family
from vlm_batch import VLMBatcher
from vlm_batch.arrays import as_mlx
from vlm_batch.assets import default_checkpoint
from vlm_batch.caches import Placement
from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.decoding import last_tokens
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.limit import LADDER, Capacity, RowLimit
from vlm_batch.engine.shapes import FixedShapes
from vlm_batch.models import adapter_for
from vlm_batch.policy import POLICIES, Policy
from vlm_batch.runtime.device import Device
from vlm_batch.types import Event, SamplingParams

Curve = Callable[[int], float]

#: Seconds of a step by rows: launches decide; every row costs as much; both; launches decide up to 16 rows.
CURVES: dict[str, Curve] = {
    "flat": lambda rows: 0.01,
    "linear": lambda rows: 0.004 * rows,
    "mixed": lambda rows: 0.016 + 0.0017 * rows,
    "knee": lambda rows: 0.01 * max(1.0, rows / 16),
}


def climbed(
    curve: Curve,
    *,
    first: int = 8,
    most: int = 64,
    steps: int = 2000,
    noise: float = 0.0,
    **how: Any,
) -> list[int]:
    """The number of rows after each step of a full batch."""
    chance = random.Random(7)
    limit = RowLimit(first, most, **how)
    found = []
    for _ in range(steps):
        limit.record(
            limit.rows, curve(limit.rows) * (1 + noise * (2 * chance.random() - 1))
        )
        found.append(limit.rows)
    return found


@pytest.mark.parametrize(
    ("name", "rows"), [("flat", 64), ("linear", 8), ("mixed", 24), ("knee", 16)]
)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_it_ends_where_more_rows_stop_paying(
    name: str, rows: int, noise: float
) -> None:
    found = climbed(CURVES[name], noise=noise)
    often = max(set(found[200:]), key=found[200:].count)
    assert (
        often == rows
        if not noise
        else LADDER.index(often) - LADDER.index(rows) in (-1, 0, 1)
    )


def test_a_flat_curve_is_climbed_at_once() -> None:
    assert climbed(CURVES["flat"]).index(64) <= 6 * RowLimit.STEPS


def test_what_does_not_pay_is_tried_ever_more_rarely() -> None:
    found = climbed(CURVES["linear"], steps=8000)
    tries = [step for step in range(1, len(found)) if found[step] > found[step - 1]]
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert len(tries) >= 4 and all(
        later >= 1.8 * earlier for earlier, later in pairwise(gaps)
    )
    assert sum(rows > 8 for rows in found) < 0.02 * len(found)


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_it_stays_between_one_and_the_most(name: str, noise: float) -> None:
    assert {
        1 <= rows <= 24 for rows in climbed(CURVES[name], first=3, most=24, noise=noise)
    } == {True}


def test_it_goes_below_the_first_where_fewer_rows_were_cheaper_each() -> None:
    limit = RowLimit(8, 64)
    # memory is short, say: the machine swaps
    for rows, seconds in ((4, 0.01), (8, 0.1)):
        for _ in range(RowLimit.STEPS):
            limit.record(rows, seconds)
    assert limit.rows == 4


def test_it_does_not_grow_where_nobody_waits_or_a_step_is_long_already() -> None:
    limit = RowLimit(8, 64)
    for _ in range(100):
        limit.record(8, 0.01, are_waiting=False)
    assert limit.rows == 8
    assert set(climbed(lambda rows: 0.2, steps=300)) == {8}
    assert climbed(lambda rows: 0.2, steps=300, gap=0.3)[-1] == 64


def test_a_batch_that_is_not_full_says_nothing_of_more_rows() -> None:
    limit = RowLimit(8, 64)
    for _ in range(100):
        limit.record(5, 0.01)
    assert limit.rows == 8


def test_its_bounds_are_checked() -> None:
    for first, most in ((0, 8), (9, 8)):
        with pytest.raises(ValueError, match="1 <= first <= most"):
            RowLimit(first, most)


def test_only_steps_that_did_nothing_else_are_fed() -> None:
    capacity = Capacity(Policy(first_rows=8, most_rows=64))
    for _ in range(50):
        capacity.record(8, 0.01, 256, are_waiting=True)
        # a device may still be at the chunk
        capacity.record(8, 0.01, 0, are_waiting=True)
    assert capacity.num_places == 8
    for _ in range(50):
        capacity.record(8, 0.01, 0, are_waiting=True)
    assert capacity.num_places > 8
    capacity.run_out(7)
    assert capacity.num_places == 6, "memory goes first"


def test_said_rows_stay() -> None:
    capacity = Capacity(Policy(max_rows=5))
    for _ in range(50):
        capacity.record(5, 0.01, 0, are_waiting=True)
    assert capacity.num_places == 5


NAME = "qwen2_vl"


@pytest.mark.parametrize(
    ("placement", "exact", "places"),
    [
        (Placement.ROWS, None, (0, 1, 2, 3, 4, 5, 6)),
        (Placement.SLAB, None, (0, 1, 2, 4, 6)),
        (Placement.SLAB, FixedShapes((2, 4, 8), Placement.SLAB), (0, 2, 4, 8)),
    ],
    ids=["rows", "slab", "reproducible slab"],
)
def test_rows_come_and_go_while_their_number_changes(
    placement: Placement,
    exact: FixedShapes | None,
    places: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A limit that moves at almost every step, and slabs that are made anew: each row's answer is the one it gets alone."""
    config = {"first_rows": 1, "most_rows": 6, "prefill_budget": 64}
    adapter = (
        adapter_for(NAME)(family(NAME).build())
        if exact is not None
        else shared_adapter(NAME)
    )
    generator = BatchGenerator(
        adapter, policy=settings_for(placement, **config), shapes=exact
    )
    limit = generator.capacity.limit
    assert limit is not None and generator.capacity.num_places == 1
    keys = [f"text:{seed}:{5 + seed}" for seed in range(9)] + ["image:1:0", "image:2:1"]
    widths: list[int] = []
    counts: list[int] = []
    whole = generator.step

    def step() -> list[Event]:
        limit.rows = (1, 3, 6, 6, 6, 4)[len(counts) % 6]
        events = whole()
        widths.append(sum(len(group.places) for group in generator.rows.batch.groups))
        counts.append(len(generator.rows.batch))
        return events

    monkeypatch.setattr(generator, "step", step)
    check(NAME, run_family(NAME, [Ask(key) for key in keys], generator=generator))
    assert max(counts) > 3
    assert set(widths) <= set(places) and max(widths) == max(places)
    assert widths[-1] == 0, "an idle batch holds nothing"


def test_slabs_have_the_places_that_their_rows_need() -> None:
    generator = BatchGenerator(
        shared_adapter(NAME), policy=settings_for(Placement.SLAB, max_rows=16)
    )
    batch, few = generator.rows.batch, 0
    for seed, count in enumerate((28, 24, 4, 16, 20)):
        inputs = as_mlx(inputs_of(NAME, f"text:{seed}:{5 + seed}"))
        generator.insert(str(seed), inputs, SamplingParams(max_tokens=count))
    assert [batch.slabs([9] * count)[0][0] for count in (1, 5, 40)] == [1, 8, 40]
    while generator.has_work:
        generator.step()
        for group in batch.groups:
            assert (
                {len(layer.arrays()[0]) for layer in group.layers}
                == {len(group.places)}
                <= {8, 2, 1}
            )
            few += len(group.places) < 8
    assert few, "what is left at the end is among a few of them"
    assert not batch.groups


def test_a_batcher_says_how_many_may_live() -> None:
    with VLMBatcher(default_checkpoint()) as batcher:
        assert batcher.stats().most_rows == POLICIES[Device.CPU].first_rows
    with VLMBatcher(default_checkpoint(), max_rows=3) as batcher:
        assert batcher.stats().most_rows == 3


@pytest.mark.parametrize("placement", list(Placement))
def test_no_place_is_left_for_rows_that_did_not_come(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others were to join in the same step and failed."""
    join = DecodeBatch.join
    monkeypatch.setattr(
        DecodeBatch,
        "join",
        lambda self, row, caches, others=0: join(self, row, caches, others + 2),
    )
    generator = BatchGenerator(shared_adapter(NAME), policy=settings_for(placement))
    generator.insert(
        "a", as_mlx(inputs_of(NAME, "text:5:26")), SamplingParams(max_tokens=NUM_TOKENS)
    )
    results = [
        event.result
        for _ in range(200)
        if generator.has_work
        for event in generator.step()
        if event.result
    ]
    assert [list(result.token_ids) for result in results] == [
        oracle(NAME, "text:5:26").tokens[:NUM_TOKENS]
    ]
    assert not generator.rows.batch.groups


def test_last_tokens_come_in_the_order_of_places() -> None:
    """From arrays that rows share or have alone, in any order; empty places have zeros."""
    first, second = mx.array([3, 4, 5]), mx.array([7, 8])

    def at(array: mx.array, index: int) -> Any:
        return SimpleNamespace(answer=SimpleNamespace(drawn=(array, index)))

    for drawn, told in (
        ([at(first, 0), at(first, 1), at(first, 2)], [3, 4, 5]),
        ([at(first, 2), at(first, 0)], [5, 3]),
        ([at(second, 1), at(first, 0), at(second, 0), at(first, 1)], [8, 3, 7, 4]),
        ([None, at(first, 1), None, at(second, 0)], [0, 4, 0, 7]),
        ([at(first, 0), at(first, 1), at(first, 2), None], [3, 4, 5, 0]),
    ):
        assert last_tokens(drawn).tolist() == told
