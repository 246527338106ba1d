"""Recurrent state in a batch: rows come and go, in both placements, and nothing of them is left or grows."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.cache import ArraysCache, CacheList, KVCache

from tests.harness import inputs_of, settings_for, shared_adapter
from vlm_batch.arrays import as_mlx
from vlm_batch.caches import ListedCache, Placement, RecurrentCache, RowsCache, SlabCache, kind_of
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.types import SamplingParams


def row(value: float, *, second: bool = True) -> ArraysCache:
    """A single row's state: (1, 3, 2), and (1, 4) or nothing."""
    cache = ArraysCache(2)
    cache[0] = mx.full((1, 3, 2), value)
    cache[1] = mx.full((1, 4), value) if second else None
    return cache


def values(cache: RecurrentCache) -> list[list[float]]:
    return [np.array(state).reshape(len(state), -1)[:, 0].tolist() for state in cache.arrays()]


def test_rows_are_put_replaced_removed_and_cut() -> None:
    cache = RecurrentCache()
    for place in range(3):
        cache.resize(place + 1)
        cache.put(place, row(place + 1))
    assert values(cache) == [[1, 2, 3]] * 2
    cache.clear(1)
    cache.put(1, row(9))
    assert values(cache) == [[1, 9, 3]] * 2
    cache.remove(0)
    assert values(cache) == [[9, 3]] * 2
    cache.resize(1)
    assert values(cache) == [[9]] * 2
    assert cache.nbytes == (6 + 4) * 4
    assert cache.make_mask(1) is None
    assert cache.lengths is None


def test_a_slot_that_a_row_has_not_filled_begins_with_zeros() -> None:
    cache = RecurrentCache()
    cache.resize(3)
    cache.put(0, row(1, second=False))
    assert cache[1] is None
    cache.put(1, row(2))
    assert values(cache) == [[1, 2, 0], [0, 2, 0]]
    cache.put(2, row(3, second=False))
    assert values(cache) == [[1, 2, 3], [0, 2, 0]]


@pytest.mark.parametrize(("placement", "kind"), [(Placement.ROWS, RowsCache), (Placement.SLAB, SlabCache)])
def test_a_list_of_caches_has_a_layer_cache_for_each(placement: Placement, kind: type) -> None:
    layer = kind_of(CacheList(ArraysCache(2), KVCache())).batched(placement, 4)
    assert isinstance(layer, ListedCache)
    assert isinstance(layer[0], RecurrentCache)
    assert isinstance(layer[1], kind)


@pytest.mark.parametrize("placement", list(Placement))
def test_neighbours_states_stay_when_a_row_leaves_and_another_joins(placement: Placement) -> None:
    generator = BatchGenerator(shared_adapter("qwen3_5"), policy=settings_for(placement))
    for index, key in enumerate(("text:4:9", "image:2:1", "text:5:26")):
        generator.insert(str(index), as_mlx(inputs_of("qwen3_5", key)), SamplingParams(max_tokens=40))
    for _ in range(4):
        generator.step()
    layer = generator.rows.batch.layers[0]
    assert isinstance(layer, RecurrentCache)
    before = [np.array(state) for state in layer.arrays()]
    generator.cancel("1")
    kept = [0, 1] if placement is Placement.ROWS else [0, 2]
    for old, new in zip(before, layer.arrays(), strict=True):
        np.testing.assert_array_equal(old[[0, 2]], np.array(new)[kept])


@pytest.mark.parametrize("placement", list(Placement))
def test_nothing_grows_with_the_tokens(placement: Placement) -> None:
    """Live arrays and bytes after 60 tokens are those after 20; nothing keeps a graph of the steps before."""
    generator = BatchGenerator(shared_adapter("qwen3_5"), policy=settings_for(placement))
    for index, key in enumerate(("text:4:9", "text:5:26")):
        generator.insert(str(index), as_mlx(inputs_of("qwen3_5", key)), SamplingParams(max_tokens=90))
    seen = []
    for step in range(61):
        generator.step()
        if step in (20, 40, 60):
            gc.collect()
            seen.append(sum(type(item) is mx.array for item in gc.get_objects()))
            mx.eval(mx.zeros(1))
            seen.append(mx.get_active_memory())
    assert seen[0] == seen[2] == seen[4]
    assert seen[5] - seen[1] < 100_000  # keys and values of 40 tokens; a history of states would be 10 times that
