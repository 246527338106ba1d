"""Slabs take the room that their longest row needs: they grow an array at a time, and give room back when a long row leaves."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_vlm.models.cache import KVCache, RotatingKVCache

from tests.allocations import WANT
from tests.harness import Ask, check, run_family, settings_for, shared_adapter
from tests.zoo import family
from vlm_batch.adapters import operations
from vlm_batch.caches import Placement, RingSlabCache, SlabCache
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.caches.quantized import QuantizedCache, QuantizedSlabCache
from vlm_batch.engine.compiled import CompiledDecode
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.models import adapter_for
from vlm_batch.records import DecodeStep

HEADS, DEPTH, PLACES, WINDOW = 2, 64, 4, 4096
KINDS = ("full", "sliding", "few bits")


def empty(kind: str, places: int = PLACES) -> SlabCache:
    if kind == "full":
        slab = SlabCache(places)
    else:
        slab = (
            RingSlabCache(places, WINDOW)
            if kind == "sliding"
            else QuantizedSlabCache(places, 64, 8)
        )
    slab.resize(places)
    return slab


def row(kind: str, length: int) -> Any:
    """A row's own cache, with numbers of its own, evaluated."""
    mx.random.seed(length)
    keys, values = (mx.random.normal((1, HEADS, length, DEPTH)) for _ in range(2))
    if kind == "full":
        cache: Any = KVCache()
    else:
        cache = RotatingKVCache(WINDOW) if kind == "sliding" else QuantizedCache(64, 8)
    cache.update_and_fetch(keys, values)
    mx.eval(cache.state)
    return cache


def held(slab: SlabCache, place: int) -> list[mx.array]:
    """The arrays of the row at a place."""
    state = slab.extract(place).state
    return [
        part
        for states in state
        for part in (states.parts if hasattr(states, "parts") else [states])
    ]


def own(cache: Any) -> list[mx.array]:
    return [
        part
        for states in cache.state
        for part in (states.parts if hasattr(states, "parts") else [states])
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_same_while_slabs_grow_and_give_back(kind: str) -> None:
    slab = empty(kind)
    rows = {place: row(kind, length) for place, length in enumerate((200, 900, 2100))}
    for place, single in rows.items():
        slab.put(place, single)
    assert slab.capacity == 2304
    slab.clear(2)
    assert slab.capacity == 1024
    slab.clear(1)
    assert slab.capacity == 256
    slab.put(1, rows[1])
    assert slab.capacity == 1024
    for place in (0, 1):
        assert all(
            mx.array_equal(found, right).item()
            for found, right in zip(held(slab, place), own(rows[place]), strict=True)
        )
    slab.put(2, row(kind, 300))  # columns that the row of 2,100 had are zeros behind it
    for array in slab.arrays():
        assert not mx.any(array[2, :, 300:] != 0).item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_slab_that_shrinks_a_little_keeps_its_room(kind: str) -> None:
    """So that rows that come and go do not copy their neighbours each time."""
    slab = empty(kind)
    slab.put(0, row(kind, 600))
    slab.put(1, row(kind, 1000))
    slab.clear(1)
    assert slab.capacity == 1024
    slab.put(1, row(kind, 900))
    assert slab.capacity == 1024


@pytest.mark.parametrize("kind", KINDS)
def test_a_slab_grows_an_array_at_a_time(kind: str) -> None:
    """The room of the narrow slab is free again when a longer row is put in, so that no two layers hold both."""
    slab, long = empty(kind, 16), row(kind, 3000)
    slab.put(0, row(kind, 100))
    mx.eval(slab.arrays())
    narrow = slab.nbytes
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    slab.put(1, long)
    grown = mx.get_active_memory() - before
    assert abs(grown - (slab.nbytes - narrow)) < narrow


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3n", "llama4", "qwen3_5"])
def test_answers_are_the_same_over_slabs_that_grow_and_give_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capacities in steps of 4 columns: rows of several lengths make slabs wide and narrow again within a few tokens."""
    monkeypatch.setattr("vlm_batch.caches.slab.CAPACITY_STEP", 4)
    cuts: list[int] = []
    right = SlabCache._cut

    def cut(self: SlabCache, capacity: int) -> None:
        cuts.append(capacity)
        right(self, capacity)

    monkeypatch.setattr(SlabCache, "_cut", cut)
    asks = [
        Ask("text:5:26", tokens=3),
        Ask("text:4:9", tokens=12),
        Ask("image:3:2", at=4, tokens=3),
        Ask("text:6:14", at=9),
    ]
    check(name, run_family(name, asks, placement=Placement.SLAB))
    assert cuts


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_steps_are_graphs_by_default_where_launches_decide(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows join and leave, and the slab grows: each answer is the one alone. Products of few bits, and packed weights, have
    none."""
    monkeypatch.setattr(operations, "counts_launches", lambda: True)
    monkeypatch.setattr(CompiledDecode, "USES_BEFORE_GRAPH", 1)
    made: list[CompiledDecode] = []
    plain = CompiledDecode.__init__

    def watched(self: CompiledDecode, decode: Any, **how: Any) -> None:
        made.append(self)
        plain(self, decode, **how)

    monkeypatch.setattr(CompiledDecode, "__init__", watched)
    monkeypatch.setattr("vlm_batch.engine.decoding.can_leave_unfused", lambda: False)
    engine = BatchGenerator(
        shared_adapter(name), policy=settings_for(Placement.SLAB, max_rows=4)
    )
    asks = [
        Ask("text:4:250", tokens=12),
        Ask("image:2:1", at=2),
        Ask("text:5:9", at=5),
        Ask("text:6:14", at=6),
    ]
    check(name, run_family(name, asks, generator=engine))
    (graphs,) = made
    assert len(graphs._graphs) > 2, (
        "of one, two and four places, and of 256 and 512 columns"
    )
    ids = []
    for few_bits, has_graphs in (("packed", False), ("kernel", True)):
        policy = settings_for(Placement.SLAB, few_bits=few_bits)
        kv = KVQuantisation(8, group_size=32)
        few = BatchGenerator(shared_adapter(name), policy=policy, kv=kv)
        (answer,) = run_family(name, asks[:1], generator=few)
        assert answer.result is not None
        ids.append(answer.result.token_ids)
        assert bool(made[-1]._graphs) == has_graphs
    assert ids[0] == ids[1]
    assert len(made) == 3
    packed = adapter_for(name)(family(name).build())
    nn.quantize(
        packed.language,
        group_size=32,
        bits=8,
        class_predicate=lambda path, _: path.endswith("q_proj"),
    )
    BatchGenerator(packed, policy=settings_for(Placement.SLAB))
    BatchGenerator(
        shared_adapter(name), policy=settings_for(Placement.ROWS), compile_decode=False
    )
    assert len(made) == 3


def test_a_compiled_step_that_fails_holds_no_slab() -> None:
    """Its rows begin again for want of memory, and what the slabs take is to be free by then."""

    def fails(step: DecodeStep) -> mx.array:
        raise RuntimeError(WANT)

    compiled, slab = CompiledDecode(fails, uses_before_graph=0), empty("full")
    slab.put(0, row("full", 9))
    tokens = mx.zeros((PLACES, 1), dtype=mx.int32)
    with contextlib.suppress(RuntimeError):
        compiled(DecodeStep(tokens, tokens[:, 0], [slab], [{}] * PLACES))
        raise AssertionError("it was to fail")
    held = weakref.ref(slab)
    del slab
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("count", [2, 5, 8])
@pytest.mark.parametrize(
    "lengths", [(3, 0, 6), (8, 21, 0), (7, 15, 40), (2, 3, 4)], ids=str
)
def test_a_ring_after_a_forward_with_drafts_holds_what_single_steps_leave(
    lengths: tuple[int, ...], count: int
) -> None:
    """Each position sees what it sees in a step of its own; rejected positions have overwritten nothing."""
    window = 8
    mx.random.seed(count)
    # keys of each place; values are their doubles
    tokens = [mx.random.normal((1, HEADS, 64, DEPTH)) for _ in lengths]

    def at(position: int) -> mx.array:  # of each place's sequence
        return mx.concatenate(
            [
                own[:, :, (n + position) % 64][:, :, None]
                for own, n in zip(tokens, lengths, strict=True)
            ]
        )

    def ring() -> RingSlabCache:
        slab = RingSlabCache(len(lengths), window)
        for place, length in enumerate(lengths):
            cache = RotatingKVCache(window)
            for position in range(length):
                one = tokens[place][:, :, position % 64][:, :, None]
                cache.update_and_fetch(one, 2 * one)
            if length:
                slab.put(place, cache)
        return slab

    for kept in {1, count // 2 + 1, count}:
        slab, single = ring(), ring()
        view = slab.drafted([count] * len(lengths))
        new = mx.stack([at(position) for position in range(count)], axis=1).reshape(
            -1, HEADS, 1, DEPTH
        )
        mask = view.make_mask(1)
        states = view.update_and_fetch(new, 2 * new)
        for position in range(count):
            seen = single.make_mask(1)
            keys, values = single.update_and_fetch(at(position), 2 * at(position))
            if position == kept - 1:
                done = {
                    place: single.extract(place).state
                    for place, length in enumerate(lengths)
                    if length
                }
            for place, length in enumerate(lengths):
                row = mask[place * count + position, 0, 0]
                right = mx.ones_like(row) if seen is None else seen[place, 0, 0]
                if length:
                    assert (
                        row[: right.size].tolist() == right.tolist()
                        and not row[right.size :].any().item()
                    )
                for half, other in zip(states, (keys, values), strict=True):
                    mine = half.of(position)[place][:, : right.size]
                    assert (
                        mx.array_equal(
                            mine * right[:, None], other[place] * right[:, None]
                        ).item()
                        or not length
                    )
        for place, length in enumerate(lengths):
            if length:
                slab.keep(place, kept)
                found = slab.extract(place)
                assert found.offset == length + kept
                assert all(
                    mx.array_equal(*pair).item()
                    for pair in zip(found.state, done[place] or (), strict=True)
                )
