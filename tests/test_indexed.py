"""The cache of layers that pick what they read by an index: mlx-vlm's index, grown in steps, saved, cut and quantised."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.cache import KVCache
from mlx_vlm.models.qwen4_exp.language import QSAKVCache

from tests.harness import Ask, check, run_family, settings_for, shared_adapter
from vlm_batch.caches import IndexedCache, Placement
from vlm_batch.caches.indexed import STEP
from vlm_batch.caches.layers import kind_of
from vlm_batch.caches.quantisation import KVQuantisation, LateCache
from vlm_batch.caches.quantized import QuantizedCache
from vlm_batch.caches.turbo import TurboCache
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.models import _minimax_m3_vl

#: Rows of which some have something to choose from.
UNEVEN = [
    Ask("text:4:3"),
    Ask("text:6:14", tokens=4),
    Ask("text:7:40"),
    Ask("text:5:26", at=2),
]
CHUNKS = (5, STEP - 7, 1, 1, 1, 40, 1)


def tokens(seed: int, count: int) -> tuple[mx.array, mx.array, mx.array]:
    """The indexer's keys (1, L, 8), their positions (3, 1, L), and keys that serve as values, too, (1, 2, L, 16)."""
    random = np.random.RandomState(seed)
    keys = random.standard_normal((1, count, 8))
    states = random.standard_normal((1, 2, count, 16))
    positions = random.randint(0, 999, (3, 1, count))
    return (
        mx.array(keys.astype(np.float32)),
        mx.array(positions.astype(np.int32)),
        mx.array(states.astype(np.float32)),
    )


def filled(cache: Any, chunks: tuple[int, ...] = CHUNKS) -> tuple[mx.array, mx.array]:
    """What the last of some chunks of tokens is given of the index."""
    for seed, count in enumerate(chunks):
        keys, positions, states = tokens(seed, count)
        found = cache.update_indexer(keys, positions if count > 1 else positions[0])
        cache.update_and_fetch(states, states)
    return found


def test_the_index_is_upstreams() -> None:
    cache, theirs = IndexedCache(), QSAKVCache()
    for mine, right in zip(filled(cache), filled(theirs), strict=True):
        np.testing.assert_array_equal(mine, right)
    assert cache.offset == theirs.offset == sum(CHUNKS)


@pytest.mark.parametrize("length", [3, 260, sum(CHUNKS)])
def test_a_saved_index_is_cut_and_never_written_to(length: int) -> None:
    cache = IndexedCache()
    keys, positions = filled(cache)
    state = kind_of(cache).saved(cache.offset)
    assert state.is_whole and kind_of(cache).is_whole
    filled(cache)  # what the row does later is its own affair
    for _ in range(2):
        again = state.restore(length)
        assert again.offset == length
        found, where = again.update_indexer(*tokens(99, 2)[:2])
        np.testing.assert_array_equal(found[:, :length], keys[:, :length])
        np.testing.assert_array_equal(where[..., :length], positions[..., :length])
        np.testing.assert_array_equal(found[:, length:], tokens(99, 2)[0])
        assert state.restore(length).offset == length


@pytest.mark.parametrize(
    ("how", "kinds"),
    [
        (KVQuantisation(8, 32), [QuantizedCache] * 2),
        # the last layer stays exact, as in mlx-vlm
        (KVQuantisation(4, scheme="turboquant"), [TurboCache, KVCache]),
        (KVQuantisation(8, 32, start=9), [LateCache] * 2),
    ],
)
def test_keys_and_values_in_few_bits_beside_an_exact_index(
    how: KVQuantisation, kinds: list[type]
) -> None:
    fresh = shared_adapter("qwen4_exp").make_cache()
    assert how.counts(fresh) == (2 - kinds.count(KVCache), 4)
    assert [
        type(cache.inner) for cache in fresh if isinstance(cache, IndexedCache)
    ] == [KVCache] * 2
    quantised = [
        cache for cache in how.caches(fresh) if isinstance(cache, IndexedCache)
    ]
    assert [type(cache.inner) for cache in quantised] == kinds
    found, _ = filled(quantised[0])
    np.testing.assert_array_equal(found, filled(IndexedCache())[0])


@pytest.mark.parametrize("placement", Placement, ids=lambda placement: placement.value)
@pytest.mark.parametrize(
    "name", ["minimax_m3_vl", "glm5_next", "qwen4_exp", "deepseek_v4"]
)
def test_a_step_chooses_for_all_rows_at_once(
    name: str, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No layer goes row by row, some rows have something to choose from and others not, and each gets its answer."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a layer decodes row by row")

    monkeypatch.setattr(f"vlm_batch.models._{name}.each_row", refused)
    policy = settings_for(placement, max_rows=4, short_rows=0, draft="off")
    engine = BatchGenerator(shared_adapter(name), policy=policy)
    check(name, run_family(name, UNEVEN, generator=engine))


@pytest.mark.parametrize("placement", Placement, ids=lambda placement: placement.value)
def test_long_rows_gather_what_they_read(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    # rows from 32 tokens on, and every slab
    monkeypatch.setattr(_minimax_m3_vl, "FAR", 4)
    called = {
        name: Mock(wraps=getattr(_minimax_m3_vl, name))
        for name in ("_gathered", "each_row")
    }
    for name, watched in called.items():
        monkeypatch.setattr(_minimax_m3_vl, name, watched)
    policy = settings_for(placement, max_rows=4, short_rows=0, draft="off")
    engine = BatchGenerator(shared_adapter("minimax_m3_vl"), policy=policy)
    check("minimax_m3_vl", run_family("minimax_m3_vl", UNEVEN, generator=engine))
    assert called["_gathered" if placement is Placement.SLAB else "each_row"].called


@pytest.mark.parametrize("name", ["minimax_m3_vl", "glm5_next", "qwen4_exp"])
def test_prompts_of_one_length_share_an_array(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = shared_adapter(name)
    rows: list[int] = []
    plain = type(adapter).prefill

    def watched(self: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(ids))
        return plain(self, ids, *args, **kwargs)

    monkeypatch.setattr(type(adapter), "prefill", watched)
    engine = BatchGenerator(
        adapter,
        policy=settings_for(
            Placement.ROWS, max_rows=4, idle_budget=512, prefill_together=4
        ),
    )
    check(
        name,
        run_family(
            name, [Ask(f"text:{seed}:14") for seed in (4, 6, 7)], generator=engine
        ),
    )
    assert 3 in rows, rows
