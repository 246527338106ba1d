"""Rows that keep caches of their own in a batch: nobody copies them, and each attends to its own positions."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.cache import KVCache

from tests.harness import Ask, check, run_family, settings_for, shared_adapter
from vlm_batch.adapters.attention import attention
from vlm_batch.caches import Placement, RowsCache
from vlm_batch.engine.generator import BatchGenerator

LENGTHS = (7, 5, 5, 9, 0, 5)  # 0: an empty place
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


def layer_of(lengths: tuple[int, ...] = LENGTHS) -> RowsCache:
    layer = RowsCache()
    layer.resize(len(lengths))
    for place, length in enumerate(lengths):
        if length:
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


def test_each_row_has_the_numbers_that_it_has_alone() -> None:
    layer = layer_of()
    found = step(layer, 0)
    shape = (len(LENGTHS), KV_HEADS, 1, WIDTH)
    keys, values, wide = (
        mx.random.normal(shape, key=mx.random.key(1000 + i)) for i in range(3)
    )
    queries = mx.concatenate([wide, -wide], axis=1)
    for place, length in enumerate(LENGTHS):
        if not length:
            assert not found[place].any()
            continue
        own, one = slice(place, place + 1), filled(length, seed=10 * place)
        seen, held = one.update_and_fetch(keys[own], values[own])
        right = attention(queries[own], seen, held, one, 0.35)
        assert np.array_equal(found[own], np.array(right))
    assert layer.lengths == tuple(length + (length > 0) for length in LENGTHS)


def test_a_row_is_adopted_and_taken_without_a_copy() -> None:
    layer, row = layer_of((5, 5)), filled(4, seed=77)
    layer.clear(1)
    layer.put(1, row)
    assert layer.extract(1) is row
    step(layer, 0)
    layer.keep_places([1])
    assert layer.extract(0) is row and layer.lengths == (5,)


@pytest.mark.parametrize("name", ["qwen2_vl", "kimi_vl", "gemma3"])
def test_pictures_of_one_size_decode_beside_each_other(name: str) -> None:
    """Three that come together, of which one ends early, and one that comes later: each gets the answer that it gets alone."""
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


def test_the_bytes_of_rows_can_be_asked_for_while_rows_leave() -> None:
    """``stats`` is asked from other threads than the one that frees places."""
    batch = RowsCache()
    rows = [filled(3, seed=place) for place in range(3)]
    batch.places = list(rows)
    live = batch.live
    del batch.places[1:]
    assert live == rows and batch.nbytes == rows[0].nbytes
