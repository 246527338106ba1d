"""Nothing of a request stays behind: not on the caller's model, not on the adapter's working copy, not in memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_vlm.models.cache import KVCache, RotatingKVCache

from tests.harness import (
    Ask,
    check,
    every_family,
    inputs_of,
    run,
    run_family,
    settings_for,
)
from tests.zoo import FAMILIES
from tests.zoo import family as tiny_family
from vlm_batch.arrays import arrays_of, as_mlx
from vlm_batch.caches import Placement
from vlm_batch.caches.rows import RowStates
from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Prompt, new_row
from vlm_batch.engine.runner import Runner
from vlm_batch.engine.shapes import FreeShapes
from vlm_batch.models import adapter_for
from vlm_batch.records import DecodeStep, Encoded
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.prefix import PrefixCache
from vlm_batch.types import SamplingParams


def snapshot(module: nn.Module) -> dict[str, Any]:
    """Every attribute of every module: arrays and containers by identity of their arrays, the rest by value."""
    found: dict[str, Any] = {}
    for path, child in module.named_modules():
        for name, value in [*child.items(), *vars(child).items()]:
            if isinstance(value, nn.Module):
                continue
            found[f"{path}.{name}"] = _mark(value)
    return found


def _mark(value: Any) -> Any:
    if isinstance(value, mx.array):
        return id(value)
    if isinstance(value, (list, tuple)):
        return [_mark(item) for item in value]
    return (
        value if isinstance(value, (int, float, str, bool, type(None))) else id(value)
    )


@pytest.mark.parametrize("name", every_family())
def test_no_request_leaves_anything_on_a_model(name: str) -> None:
    """A, then B, then A again: the same attributes after each, and the caller's model as it was before."""
    model = tiny_family(name).build()
    untouched = snapshot(model)
    adapter = adapter_for(tiny_family(name).registered)(model)
    seen = []
    for key in ("image:1:0", "text:4:9", "image:1:0", "image:3:2"):
        check(name, run(adapter, lambda key: inputs_of(name, key), [Ask(key)]))
        seen.append(snapshot(adapter.model))
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert snapshot(model) == untouched


def test_an_adapter_goes_with_the_last_reference_to_it() -> None:
    """Nobody waits for the garbage collector with a model's weights."""
    gc.collect()
    gc.disable()
    try:
        for name in FAMILIES:
            tiny = tiny_family(name)
            adapter = adapter_for(tiny.registered)(tiny.build())
            held = weakref.ref(adapter), weakref.ref(adapter.model)
            del adapter
            assert [one() for one in held] == [None, None], name
    finally:
        gc.enable()


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("placement", list(Placement))
def test_embeddings_and_pixels_are_let_go_of_after_prefill(
    placement: Placement, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weak references to the pixels, the embeddings and the pictures' features for the layers are dead once a row decodes."""
    from tests.harness import shared_adapter

    adapter = shared_adapter("qwen3_vl")
    prefix = PrefixCache(ByteBudget(2**28)) if is_kept else None
    generator = BatchGenerator(
        adapter, policy=settings_for(placement), reuse=Reuse(adapter, prefix)
    )
    inputs = as_mlx(inputs_of("qwen3_vl", "image:1:0"))
    gone = [weakref.ref(inputs["pixel_values"])]
    encode = adapter.encode

    def watched(*arguments: Any) -> Encoded:
        encoded = encode(*arguments)
        deepstack = arrays_of(list(encoded.prefill.values()))
        assert deepstack
        gone.extend(weakref.ref(array) for array in (encoded.inputs_embeds, *deepstack))
        return encoded

    monkeypatch.setattr(adapter, "encode", watched)
    generator.insert("a", inputs, SamplingParams(max_tokens=6))
    del inputs
    generator.step()
    row = generator.rows.batch.rows[0]
    gc.collect()
    assert len(gone) > 2
    assert all(reference() is None for reference in gone)
    assert row.prompt.encoded is None and not row.prompt.cache
    while generator.has_work:
        generator.step()
    assert generator.rows.batch.nbytes == 0
    assert not generator.rows.batch.groups


def test_nobody_holds_what_a_chunk_is_written_into(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row's keys and values would be copied with every chunk, and once more by the first token."""
    from tests.harness import shared_adapter

    adapter = shared_adapter("qwen2_vl")
    config = {"prefill_budget": 5, "idle_budget": 5, "max_chunk": 5}
    generator = BatchGenerator(adapter, policy=settings_for(Placement.ROWS, **config))
    states: list[weakref.ref[mx.array]] = []
    held: list[int] = []

    def noting(call: Any) -> Any:
        def noted(*args: Any) -> Any:
            held.append(sum(state() is not None for state in states))
            return call(*args)

        return noted

    def made_noting(self: Runner, row: Any, *args: Any) -> Any:
        answer = made(self, row, *args)
        states.extend(weakref.ref(array) for array in answer[0].arrays)
        return answer

    made = Runner._made
    monkeypatch.setattr(Runner, "_made", made_noting)
    monkeypatch.setattr(adapter, "prefill", noting(adapter.prefill))
    monkeypatch.setattr(generator._decoder, "logits", noting(generator._decoder.logits))
    generator.insert(
        "a", as_mlx(inputs_of("qwen2_vl", "text:5:26")), SamplingParams(max_tokens=2)
    )
    while generator.has_work:
        generator.step()
    assert len(held) > 5
    assert held[:-1] == [0] * (len(held) - 1)
    assert held[-1] <= 1  # the prompt's logits


@pytest.mark.parametrize("placement", list(Placement))
def test_a_join_and_a_leave_touch_no_other_row(placement: Placement) -> None:
    """Neighbours' arrays are the same objects before and after, one cache a row; a slab's other rows have the same bytes."""
    from tests.harness import shared_adapter

    generator = BatchGenerator(
        shared_adapter("qwen2_vl"), policy=settings_for(placement)
    )
    for index, key in enumerate(("text:4:9", "image:2:1", "text:5:26")):
        generator.insert(
            str(index),
            as_mlx(inputs_of("qwen2_vl", key)),
            SamplingParams(max_tokens=40),
        )
    for _ in range(4):
        generator.step()
    before = _kv_of(generator, "0")
    generator.cancel("1")
    assert _kv_of(generator, "0") == before
    generator.step()
    generator.insert(
        "3", as_mlx(inputs_of("qwen2_vl", "text:6:14")), SamplingParams(max_tokens=40)
    )
    length = generator.rows.batch.groups[0].layers[0].lengths[0]  # type: ignore[attr-defined]
    kept = _kv_of(generator, "0", length)
    generator.step()
    assert _kv_of(generator, "0", length) == kept


def _kv_of(
    generator: BatchGenerator, request_id: str, length: int | None = None
) -> list[Any]:
    """The row's keys in every layer, as numbers."""
    place = [
        row.request_id if row else None for row in generator.rows.batch.groups[0].places
    ].index(request_id)
    found = []
    for layer in generator.rows.batch.groups[0].layers:
        length = length or layer.lengths[place]  # type: ignore[attr-defined]
        keys, _ = layer.state  # type: ignore[attr-defined]
        row = (
            keys.apart().rows[place]
            if isinstance(keys, RowStates)
            else keys[place : place + 1]
        )
        assert row is not None
        found.append(row[:, :, :length].tolist())
    return found


@pytest.mark.parametrize("placement", list(Placement))
def test_finished_rows_are_released_or_kept_and_never_both(
    placement: Placement,
) -> None:
    """Bytes that are alive once all rows have ended: those that the prefix cache counts, and none without one."""
    from tests.harness import shared_adapter

    name = "qwen2_vl"
    adapter = shared_adapter(name)
    # the first makes the masks that all prompts share
    for is_warm, budget in ((False, 0), (True, 0), (True, 2**28)):
        prefix = PrefixCache(ByteBudget(budget)) if budget else None
        generator = BatchGenerator(
            adapter, policy=settings_for(placement), reuse=Reuse(adapter, prefix)
        )
        gc.collect()
        # held, so that no new array gets the identity of one that is gone
        earlier = _live_arrays()
        before = {id(array) for array in earlier}
        for index in range(6):
            inputs = as_mlx(
                inputs_of(name, ("image:1:0", "text:4:9", "image:3:2")[index % 3])
            )
            generator.insert(str(index), inputs, SamplingParams(max_tokens=5 + index))
        del inputs
        while generator.has_work:
            generator.step()
        gc.collect()
        alive = [array for array in _live_arrays() if id(array) not in before]
        kept = (
            []
            if prefix is None
            else [array for row in prefix.rows for array in row.arrays()]
        )
        assert {id(array) for array in kept} <= {id(array) for array in alive}
        others = sum(array.nbytes for array in alive) - sum(
            array.nbytes for array in kept
        )
        # the lengths of the last steps, as small arrays
        assert others <= 256 or not is_warm
        assert bool(kept) == bool(budget)


def _live_arrays() -> list[mx.array]:
    return [item for item in gc.get_objects() if type(item) is mx.array]


def test_the_arrays_of_a_row_do_not_grow_in_number() -> None:
    """Live arrays per decoded token are constant: nothing keeps a graph or a history per token."""
    from tests.harness import shared_adapter

    generator = BatchGenerator(shared_adapter("qwen2_vl"))
    generator.insert(
        "a", as_mlx(inputs_of("qwen2_vl", "text:4:9")), SamplingParams(max_tokens=400)
    )
    counts = []
    for step in range(300):
        generator.step()
        if step in (100, 200, 299):
            gc.collect()
            counts.append(sum(type(item) is mx.array for item in gc.get_objects()))
    assert counts[0] == counts[1] == counts[2]
    assert run_family("qwen2_vl", [Ask("text:4:9")])


def test_two_thousand_tokens_leave_no_more_arrays_than_a_hundred() -> None:
    """Recurrent states, too, are a result and not a history (mlx-lm once built a graph over all of an answer's tokens)."""
    from tests.harness import shared_adapter

    adapter = shared_adapter("qwen3_5")  # keys and values in every other layer
    caches = adapter.make_cache()
    mx.eval(
        adapter.prefill(
            [adapter.encode(as_mlx(inputs_of("qwen3_5", "text:4:9")))], caches, 0, 9
        )
    )
    batch = DecodeBatch(FreeShapes(Placement.ROWS), 1)
    row = new_row("a", Prompt(), SamplingParams())
    # of one length
    own = [RotatingKVCache(64) if type(cache) is KVCache else cache for cache in caches]
    for cache in own:
        if isinstance(cache, RotatingKVCache):
            cache.update_and_fetch(*caches[-1].state)
    batch.join(row, own)
    counts = []
    for step in range(2_000):
        token = mx.array([[step % 100]], dtype=mx.int32)
        logits = adapter.decode(
            DecodeStep(token, mx.array([9 + step], dtype=mx.int32), batch.layers, [{}])
        )
        mx.eval(logits, [layer.arrays() for layer in batch.layers])
        if step in (100, 1_000, 1_999):
            gc.collect()
            counts.append(sum(type(item) is mx.array for item in gc.get_objects()))
    assert counts[0] == counts[1] == counts[2]
