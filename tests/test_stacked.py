"""Rows of one length that came together are one array while they decode: the same numbers as of each row by itself."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.cache import KVCache

from tests.harness import Ask, check, run_family, settings_for, shared_adapter
from vlm_batch.adapters.attention import attention
from vlm_batch.caches import Placement, RowsCache
from vlm_batch.caches.rows import MOST_STACKED
from vlm_batch.engine.generator import BatchGenerator

LENGTHS = (7, 5, 5, 5, 9, 9, 5)
HEADS, KV_HEADS, WIDTH = 4, 2, 8


def filled(length: int, seed: int) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(
        *(
            mx.random.normal((1, KV_HEADS, length, WIDTH), key=mx.random.key(seed + i))
            for i in (0, 1)
        )
    )
    return cache


def layer_of(may_stack: bool, lengths: tuple[int, ...] = LENGTHS) -> RowsCache:
    layer = RowsCache(may_stack=may_stack)
    layer.resize(len(lengths))
    for place, length in enumerate(lengths):
        layer.put(place, filled(length, seed=10 * place))
    return layer


def step(layer: RowsCache, number: int) -> np.ndarray:
    """Attention of a new token of each place (B, H, 1, D)."""
    shape = (len(layer.lengths), KV_HEADS, 1, WIDTH)
    keys, values, wide = (
        mx.random.normal(shape, key=mx.random.key(1000 + 3 * number + i))
        for i in range(3)
    )
    mask = layer.make_mask(1)
    found = layer.update_and_fetch(keys, values)
    return np.array(
        attention(mx.concatenate([wide, -wide], axis=1), *found, layer, 0.35, mask)
    )


def held(layer: RowsCache) -> list[str]:
    ids = list(map(id, layer.places))
    return [
        "empty"
        if one is None
        else "one of several"
        if ids.count(id(one)) > 1
        else "own"
        for one in layer.places
    ]


def same(one: RowsCache, other: RowsCache) -> None:
    assert one.lengths == other.lengths
    for place, length in enumerate(one.lengths):
        if length:
            for mine, theirs in zip(
                one.extract(place).state, other.extract(place).state, strict=True
            ):
                assert np.array_equal(np.array(mine), np.array(theirs))


def test_neighbours_of_one_length_are_one_array_with_the_numbers_of_each() -> None:
    """They come, decode, one goes in the middle, another takes its place, the rest closes up: bit for bit as rows apart."""
    stacked, apart = layer_of(True), layer_of(False)
    for number in range(3):
        assert np.array_equal(step(stacked, number), step(apart, number))
    several = "one of several"
    assert held(stacked) == ["own", several, several, several, several, several, "own"]
    assert stacked.nbytes == apart.nbytes and len(stacked.arrays()) < len(
        apart.arrays()
    )
    same(stacked, apart)
    for layer in (stacked, apart):
        layer.clear(2)
    assert held(stacked) == ["own", "own", "empty", "own", several, several, "own"]
    assert np.array_equal(step(stacked, 3), step(apart, 3))
    for layer in (stacked, apart):
        layer.put(2, filled(4, seed=77))
        layer.clear(4)
        layer.keep_places([0, 1, 2, 3, 5, 6])
    for number in range(4, 7):
        assert np.array_equal(step(stacked, number), step(apart, number))
    assert held(stacked) == ["own"] * 6
    same(stacked, apart)


def test_what_is_taken_is_its_own() -> None:
    layer = layer_of(True, (5, 5))
    step(layer, 0)
    taken = layer.extract(1)
    before = np.array(taken.state[0])
    step(layer, 1)
    assert type(taken) is KVCache and taken.offset == 6
    assert np.array_equal(np.array(taken.state[0]), before) and layer.lengths == (7, 7)


def test_long_rows_and_those_that_came_at_other_times_stay_apart() -> None:
    long = layer_of(True, (MOST_STACKED + 1,) * 2)
    step(long, 0)
    assert held(long) == ["own", "own"]
    layer = layer_of(True, (5,))
    step(layer, 0)
    layer.resize(2)
    layer.put(1, filled(6, seed=3))
    step(layer, 1)
    assert layer.lengths == (7, 7) and held(layer) == ["own", "own"]


def test_reproducible_rows_attend_by_themselves() -> None:
    """It is not among what is proven of a device."""
    layer = layer_of(True, (5, 5))
    layer.always_masked = True
    step(layer, 0)
    assert held(layer) == ["own", "own"]


@pytest.mark.parametrize("name", ["qwen2_vl", "kimi_vl", "gemma3"])
def test_pictures_of_one_size_decode_as_one_array(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three that come together, of which one ends early, and one that comes later: each gets the answer that it gets alone."""
    seen: list[list[str]] = []
    plain = RowsCache.update_and_fetch

    def watched(self: RowsCache, keys: mx.array, values: mx.array) -> Any:
        found = plain(self, keys, values)
        seen.append(held(self))
        return found

    monkeypatch.setattr(RowsCache, "update_and_fetch", watched)
    config = {"max_rows": 4, "idle_budget": 512, "prefill_together": 4, "short_rows": 0}
    engine = BatchGenerator(
        shared_adapter(name), policy=settings_for(Placement.ROWS, **config)
    )
    asks = [
        Ask("text:4:14"),
        Ask("text:6:14", tokens=4),
        Ask("text:7:14"),
        Ask("text:5:26", at=2),
    ]
    check(name, run_family(name, asks, generator=engine))
    assert ["one of several"] * 3 in [one[:3] for one in seen], seen[:3]
    assert seen[-1] == ["own"] * len(seen[-1])


def test_the_bytes_of_rows_can_be_asked_for_while_rows_leave() -> None:
    """``stats`` is asked from other threads than the one that frees places."""
    batch = RowsCache()
    batch.places = [KVCache() for _ in range(3)]
    runs = batch.runs()
    assert next(runs)[0] == 0
    del batch.places[1:]
    assert [first for first, _, _ in runs] == [1, 2]
