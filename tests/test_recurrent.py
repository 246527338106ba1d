"""Recurrent state in a batch: rows come and go, in both placements, and nothing of them is left or grows."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.cache import ArraysCache, CacheList, KVCache

from tests.harness import TOLERANCE, inputs_of, settings_for, shared_adapter
from tests.zoo import family
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.single import SingleRow
from vlm_batch.arrays import as_mlx
from vlm_batch.caches import (
    ListedCache,
    Placement,
    RecurrentCache,
    RowsCache,
    SlabCache,
    kind_of,
)
from vlm_batch.caches.drafted import most_positions
from vlm_batch.caches.recurrent import DraftedRecurrent, rows_of
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.options import give_options, params_to_score
from vlm_batch.engine.row import Prompt, new_row
from vlm_batch.models.falcon_h1 import FalconH1
from vlm_batch.records import OptionTokens
from vlm_batch.types import Request, SamplingParams

#: Tokens that are scored behind a prompt.
OPTION = (9, 101, 44, 7, 3)


def row(value: float, *, second: bool = True) -> ArraysCache:
    """A single row's state: (1, 3, 2), and (1, 4) or nothing."""
    cache = ArraysCache(2)
    cache[0] = mx.full((1, 3, 2), value)
    cache[1] = mx.full((1, 4), value) if second else None
    return cache


def values(cache: RecurrentCache) -> list[list[float]]:
    return [
        np.array(state).reshape(len(state), -1)[:, 0].tolist()
        for state in cache.arrays()
    ]


def test_rows_are_put_replaced_removed_and_cut() -> None:
    cache = RecurrentCache()
    for place in range(3):
        cache.resize(place + 1)
        cache.put(place, row(place + 1))
    assert values(cache) == [[1, 2, 3]] * 2
    cache.clear(1)
    cache.put(1, row(9))
    assert values(cache) == [[1, 9, 3]] * 2
    cache.clear(0)
    cache.keep_places([1, 2])
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


def test_a_graph_takes_states_and_gives_them_back() -> None:
    """A step that could not be traced has written nothing."""
    cache = RecurrentCache()
    cache.resize(2)
    cache.put(0, row(1))
    cache.put(1, row(2, second=False))
    key, slots = cache.graph_key(), cache.give()
    assert cache.arrays() == [] and [len(slot) for slot in slots] == [1, 1]
    cache.take(slots, 0)
    assert cache.graph_key() == key and cache.extract(1)[1].tolist() == [[0] * 4]
    cache.trace(cache.give(), ())
    cache[0], cache[1] = cache[0] + 1, cache[1] + 1
    cache.take(cache.give(), 1)
    assert values(cache) == [[2, 3], [2, 1]]
    assert cache.extract(1)[1].tolist() == [[1] * 4]
    cache.resize(1)
    assert cache.graph_key() != key


@pytest.mark.parametrize(
    ("placement", "kind"), [(Placement.ROWS, RowsCache), (Placement.SLAB, SlabCache)]
)
def test_a_list_of_caches_has_a_layer_cache_for_each(
    placement: Placement, kind: type
) -> None:
    layer = kind_of(CacheList(ArraysCache(2), KVCache())).batched(placement, 4)
    assert isinstance(layer, ListedCache)
    assert isinstance(layer[0], RecurrentCache)
    assert isinstance(layer[1], kind)


@pytest.mark.parametrize("placement", list(Placement))
def test_neighbours_states_stay_when_a_row_leaves_and_another_joins(
    placement: Placement,
) -> None:
    generator = BatchGenerator(
        shared_adapter("qwen3_5"), policy=settings_for(placement)
    )
    for index, key in enumerate(("text:4:9", "image:2:1", "text:5:26")):
        generator.insert(
            str(index), as_mlx(inputs_of("qwen3_5", key)), SamplingParams(max_tokens=40)
        )
    for _ in range(4):
        generator.step()
    layer = generator.rows.batch.groups[0].layers[0]
    assert isinstance(layer, RecurrentCache)
    before = [np.array(state) for state in layer.arrays()]
    generator.cancel("1")
    generator.rows.batch.groups[0].lay_out()
    kept = [0, 1] if placement is Placement.ROWS else [0, 2]
    for old, new in zip(before, layer.arrays(), strict=True):
        np.testing.assert_array_equal(old[[0, 2]], np.array(new)[kept])


@pytest.mark.parametrize("placement", list(Placement))
def test_nothing_grows_with_the_tokens(placement: Placement) -> None:
    """Live arrays and bytes after 60 tokens are those after 20; nothing keeps a graph of the steps before."""
    generator = BatchGenerator(
        shared_adapter("qwen3_5"), policy=settings_for(placement)
    )
    for index, key in enumerate(("text:4:9", "text:5:26")):
        generator.insert(
            str(index), as_mlx(inputs_of("qwen3_5", key)), SamplingParams(max_tokens=90)
        )
    seen = []
    for step in range(61):
        generator.step()
        if step in (20, 40, 60):
            gc.collect()
            seen.append(sum(type(item) is mx.array for item in gc.get_objects()))
            mx.eval(mx.zeros(1))
            seen.append(mx.get_active_memory())
    assert seen[0] == seen[2] == seen[4]
    # keys and values of 40 tokens; a history of states would be 10 times that
    assert seen[5] - seen[1] < 100_000


@pytest.mark.parametrize("width", [2, 7, 8, 16, 32, 96])
@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (4, 4)], ids=str)
def test_the_gated_delta_rule_of_qwen3_5_is_that_of_its_definition_in_float64(
    width: int, heads: tuple[int, int]
) -> None:
    """Whole qwen3_5 models of 12 sizes, even and odd, lie as near to transformers in float64 as transformers in float32 does:
    1e-5, and 1e-4 where heads are two wide (transformers: 5e-5). What differs is rounding, and neither side is wrong."""
    from mlx_vlm.models.gated_delta import gated_delta_update
    from mlx_vlm.models.qwen3_5.language import Qwen3_5GatedDeltaNet

    random, length = np.random.RandomState(width), 40
    q, k = (random.standard_normal((1, length, heads[0], width)) for _ in range(2))
    v = random.standard_normal((1, length, heads[1], width))
    a, b = (random.standard_normal((1, length, heads[1])) for _ in range(2))
    a_log, dt_bias = random.standard_normal((2, heads[1])) * 0.5 - 1
    given = [
        mx.array(value.astype(np.float32)) for value in (q, k, v, a, b, a_log, dt_bias)
    ]
    normalised = Qwen3_5GatedDeltaNet._normalize_qk(None, given[0], given[1])
    found, last = gated_delta_update(*normalised, *given[2:], use_kernel=False)
    q, k, v, a, b, a_log, dt_bias = (
        np.array(value).astype(np.float64) for value in given
    )
    q, k = (
        value / np.sqrt((value**2).sum(-1, keepdims=True) + 1e-6) for value in (q, k)
    )
    q, k = (
        np.repeat(value, heads[1] // heads[0], axis=2)[0]
        for value in (q * width**-0.5, k)
    )
    decay = np.exp(-np.exp(a_log) * np.log1p(np.exp(a + dt_bias)))[0]
    beta = (1 / (1 + np.exp(-b)))[0]
    state = np.zeros((heads[1], width, width))  # values by keys
    for step in range(length):
        state *= decay[step][:, None, None]
        seen = np.einsum("hvk,hk->hv", state, k[step])
        state += np.einsum(
            "hv,hk->hvk", (v[0, step] - seen) * beta[step][:, None], k[step]
        )
        right = np.einsum("hvk,hk->hv", state, q[step])
        np.testing.assert_allclose(
            np.array(found[0, step]), right, atol=2e-5 * max(1.0, np.abs(right).max())
        )
    np.testing.assert_allclose(
        np.array(last[0]), state, atol=2e-5 * max(1.0, np.abs(state).max())
    )


def drafted(counts: list[int], *, fixed: bool = False) -> RecurrentCache:
    """Rows 1, 2, ... after a forward with so many positions of each: each position has added 10 to their states."""
    cache = RecurrentCache()
    cache.always_masked = fixed
    cache.resize(len(counts))
    for place in range(len(counts)):
        cache.put(place, row(place + 1))
    view = DraftedRecurrent(cache, counts)
    x = mx.arange(sum(counts))
    found = []
    for number, step in enumerate(view.steps.each):
        with view.step(number) as lent:
            lent[0], lent[1] = lent[0] + 10, lent[1] + 10
            found.append(rows_of(x, step.rows))
            assert len(found[-1]) == len(step.places) == lent[0].shape[0]
    assert rows_of(mx.concatenate(found), view.steps.order).tolist() == x.tolist()
    return cache


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    "counts", [[1, 3, 2], [2, 2, 2], [4, 1, 4], [1, 1, 1], [5, 4, 3]], ids=str
)
def test_each_row_keeps_the_state_of_its_last_accepted_position(
    counts: list[int], fixed: bool
) -> None:
    for kept in ([1, 1, 1], counts, [max(1, count - 1) for count in counts]):
        cache = drafted(counts, fixed=fixed)
        for place, count in enumerate(kept):
            cache.keep(place, count)
        assert (
            values(cache)
            == [[place + 1 + 10 * count for place, count in enumerate(kept)]] * 2
        )
        assert not cache._later and not cache._kept


def test_rows_that_come_and_go_before_the_others_states_are_chosen() -> None:
    """Joins, ends, cancellations and resizes lie between a forward and the reading of its tokens."""
    cache = drafted([2, 3, 1, 4])
    cache.clear(1)
    cache.put(1, row(7))
    cache.keep(3, 3)
    cache.resize(5)
    cache.put(4, row(8))
    cache.keep(0, 2)
    cache.keep(1, 1)
    assert values(cache) == [[21, 7, 13, 34, 8]] * 2
    cache = drafted([2, 3, 1, 4])
    cache.keep(1, 3)
    cache.clear(0)
    cache.keep_places([1, 2, 3])
    assert values(cache) == [[32, 13, 14]] * 2
    cache.keep(2, 4)  # the place has moved
    assert values(cache) == [[32, 13, 44]] * 2
    cache = drafted([2, 3, 1, 4])
    cache.keep(3, 4)
    cache.resize(2)
    cache.keep(1, 2)
    assert values(cache) == [[11, 22]] * 2
    assert values_of(drafted([3]), 0, 3) == [31, 31]


def values_of(cache: RecurrentCache, place: int, kept: int) -> list[float]:
    """The states of a row that leaves with so many positions."""
    cache.keep(place, kept)
    return [float(np.array(state).ravel()[0]) for state in cache.extract(place).cache]


def test_states_that_are_held_for_drafts_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = drafted([1, 1])
    assert cache.nbytes == 80 and most_positions([cache, cache]) > 16
    for most, positions in ((160 * 3, 4), (160, 2), (159, 1)):
        monkeypatch.setattr("vlm_batch.caches.drafted.MOST_STATE_BYTES", most)
        assert most_positions([cache, cache]) == positions


def test_an_empty_place_holds_no_states() -> None:
    cache = drafted([2, 2])
    cache.keep(0, 2)
    assert cache[0].shape[0] == 2 and not cache._later
    assert values(cache) == [[21, 12]] * 2


def test_bytes_may_be_asked_for_by_another_thread() -> None:
    """They change nothing of what the engine's thread is about to choose."""
    cache = drafted([2])
    cache.keep(0, 2)
    assert cache.nbytes == 40 and cache._kept


def test_a_model_whose_recurrent_modules_are_not_patched_has_no_drafts() -> None:
    """A family of somebody else's; and rows that go through mlx-vlm's own path one at a time have none."""

    class Unpatched(FalconH1):
        @classmethod
        def patches(cls) -> dict[type, type]:
            return {}

    for name in ("qwen3_5", "falcon_h1", "qwen2_vl"):
        assert shared_adapter(name).can_draft
    others = {"falcon_h1": Unpatched, "qwen2_vl": SingleRow}
    for name, kind in others.items():
        adapter = kind(family(name).build())
        assert not adapter.can_draft
        found = scored_alone(name, adapter)
        right = scored_alone(name, shared_adapter(name))
        np.testing.assert_allclose(found, right, atol=TOLERANCE)


def scored_alone(name: str, adapter: Adapter) -> tuple[float, ...]:
    """Log-probabilities of an option of several tokens, whose positions go one by one without drafts."""
    policy = settings_for(Placement.SLAB, max_rows=1)
    engine = BatchGenerator(adapter, policy=policy)
    inputs = as_mlx(inputs_of(name, "text:5:26"))
    params = params_to_score(Request(token_ids=[1], options=[OPTION]))
    row = new_row("asked", Prompt(inputs=inputs), params)
    give_options(row, [OptionTokens(OPTION, OPTION)])
    assert row.answer.path is not None
    asked = row.answer.path.request
    engine.rows.add(row)
    while engine.has_work:
        engine.step()
    assert asked.scores[0].error is None
    return asked.scores[0].token_logprobs
