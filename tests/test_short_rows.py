"""In the layout of rows, short rows of about one length lie in one array: the same answers, whoever joins, leaves or grows."""

from __future__ import annotations

import io
import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_vlm.models.cache import KVCache
from mlx_vlm.models.rope_utils import Llama3RoPE

from tests.harness import Ask, check, run_family, settings_for, shared_adapter
from vlm_batch.adapters import operations, powers
from vlm_batch.adapters.hooks import running
from vlm_batch.adapters.rotary import RowLlama3RoPE, RowRoPE
from vlm_batch.caches import Placement, RowsCache, SlabCache
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine import compiled, shapes
from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.compiled import CompiledDecode, can_leave_unfused
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.ledger import Ledger
from vlm_batch.engine.shapes import SHORT_STEP, SPREAD, FixedShapes, FreeShapes
from vlm_batch.policy import POLICIES
from vlm_batch.records import Call, DecodeStep
from vlm_batch.runtime.device import Device

#: Full attention; windows; recurrent states; several caches of a layer; pictures in layers of their own.
KINDS = ["llava", "gemma3", "qwen3_5", "falcon_h1", "mllama"]
SHORT = FreeShapes(short_rows=1024)


def engine_of(name: str, **said: Any) -> BatchGenerator:
    return BatchGenerator(
        shared_adapter(name), policy=settings_for(Placement.ROWS, max_rows=4, **said)
    )


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layout of each decode step, and its rows."""
    seen: list[str] = []
    plain = DecodeBatch.lay_out

    def watched(self: DecodeBatch, *joining: Any) -> None:
        plain(self, *joining)
        if not joining:
            seen.append(f"{self._placement.value} {len(self.places)}")

    monkeypatch.setattr(DecodeBatch, "lay_out", watched)
    return seen


@pytest.mark.parametrize("name", KINDS)
def test_rows_join_leave_and_move_apart(
    name: str, layouts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer row comes and goes: all have caches of their own while it is there. Each gets the answer that it gets alone."""
    monkeypatch.setattr(shapes, "SPREAD", 8)
    engine = engine_of(name)
    asks = [
        Ask("text:4:9", tokens=20),
        Ask("text:6:14", tokens=9),
        Ask("text:9:60", at=3, tokens=4),
        Ask("text:5:12", at=12),
    ]
    check(name, run_family(name, asks, generator=engine))
    assert layouts[0] == "slab 2" and "rows 3" in layouts, layouts
    assert layouts.index("rows 3") < len(layouts) - 1 - layouts[::-1].index("slab 2"), (
        layouts
    )  # they came together again


def test_places_stay_dense() -> None:
    """An array of short rows has a place for each, no more: others would be computed in vain."""
    adapter, seen = shared_adapter("llava"), set[tuple[int, int]]()
    asks = [
        Ask("text:4:9", tokens=3),
        Ask("text:6:14", tokens=7),
        Ask("text:5:12", tokens=9),
        Ask("text:7:12", at=5),
    ]
    plain = adapter.decode

    def watched(step: Any, call: Call = Call()) -> mx.array:
        for layer in step.caches:
            if isinstance(layer, SlabCache):
                assert layer.keys is not None and layer.keys.shape[0] == len(
                    engine.rows.batch
                )
                seen.add((layer.keys.shape[0], layer.keys.shape[2]))
        return plain(step, call)

    adapter.decode = watched  # type: ignore[method-assign]
    try:
        engine = engine_of("llava")
        check("llava", run_family("llava", asks, generator=engine))
    finally:
        del adapter.decode  # type: ignore[attr-defined]
    assert {rows for rows, _ in seen} == {2, 3} and {
        columns for _, columns in seen
    } == {SHORT_STEP}


def test_a_row_that_is_removed_leaves_the_others_as_they_were() -> None:
    layer = SlabCache(3)
    layer.columns = lambda tokens: 64
    rows = {}
    for place, length in enumerate((5, 40, 9)):
        rows[length] = single = kv(length)
        layer.put(place, single)
    layer.clear(1)
    layer.keep_places([0, 2])
    assert layer.lengths == (5, 9) and layer.num_places == 2
    for place, length in enumerate((5, 9)):
        assert mx.array_equal(
            layer.extract(place).keys, rows[length].keys[:, :, :length]
        ).item()


def kv(length: int) -> Any:
    from mlx_vlm.models.cache import KVCache

    cache = KVCache()
    cache.update_and_fetch(
        mx.random.normal((1, 2, length, 8)), mx.random.normal((1, 2, length, 8))
    )
    return cache


def test_the_layout_goes_by_lengths_and_by_what_it_is() -> None:
    rows, slab = Placement.ROWS, Placement.SLAB
    assert SHORT.placement([20]) is rows
    assert SHORT.placement([20, 30, 40]) is slab
    assert SHORT.placement([20, 20 + 2 * SPREAD]) is slab
    assert SHORT.placement([20, 21 + 2 * SPREAD]) is rows
    # until it is twice as many
    assert SHORT.placement([20, 21 + 2 * SPREAD], slab) is slab
    assert SHORT.placement([20, 21 + 4 * SPREAD], slab) is rows
    assert (
        SHORT.placement([1000, 1000]) is rows
        and SHORT.placement([1000, 1000], slab) is slab
    )
    assert SHORT.placement([1025, 1025], slab) is rows
    assert (
        FreeShapes().placement([20, 30]) is rows
        and FixedShapes().placement([20, 30]) is rows
    )
    assert FreeShapes(Placement.SLAB).placement([20]) is slab


def test_keys_in_few_bits_and_reproducible_answers_keep_rows_apart() -> None:
    adapter, policy = shared_adapter("llava"), POLICIES[Device.CPU]
    assert FreeShapes.of(adapter, None, policy).short_rows == policy.short_rows > 0
    assert FreeShapes.of(adapter, KVQuantisation(8), policy).short_rows == 0
    assert POLICIES[Device.CUDA].short_rows == 0
    layers = FixedShapes().layers(adapter.make_cache(), 2)
    assert all(isinstance(layer, RowsCache) for layer in layers)


def test_a_few_positions_fill_up_prompts_that_share_an_array() -> None:
    policy = POLICIES[Device.CPU]
    groups = FreeShapes.of(shared_adapter("llava"), None, policy).groups(
        [30, 20, 9, 31, 100]
    )
    assert sorted(map(sorted, groups)) == [[0, 1, 3], [2], [4]]
    assert (
        FreeShapes.of(
            shared_adapter("llava"), None, settings_for(Placement.SLAB, pad_to=0)
        ).fill
        == 0
    )


@pytest.mark.parametrize("width", [16, 24])
@pytest.mark.parametrize("is_traditional", [False, True])
def test_a_steps_rotation_by_shared_factors_is_mlxs(
    width: int, is_traditional: bool
) -> None:
    x = mx.random.normal((3, 4, 1, width))
    offset = mx.array([3, 700, 41], dtype=mx.int32)
    plain: Any
    ours: Any
    plain, ours = (
        cls(16, traditional=is_traditional, base=500.0, scale=0.5)
        for cls in (nn.RoPE, RowRoPE)
    )
    # as it is without an adapter
    assert np.allclose(np.array(ours(x, offset)), np.array(plain(x, offset)), atol=1e-6)
    with running(Call(positions=offset)):
        found = ours(x, offset)
    assert not mx.array_equal(found, x).item()
    assert np.allclose(np.array(found), np.array(plain(x, offset)), atol=2e-6)
    with running(Call(positions=offset, is_fixed=True)):
        assert mx.array_equal(ours(x, offset), plain(x, offset)).item()


def test_llama_3s_rotation_by_shared_factors_is_mlxs() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain: Any
    ours: Any
    plain, ours = (
        cls(16, base=500.0, scaling_config=scaling)
        for cls in (Llama3RoPE, RowLlama3RoPE)
    )
    x, offset = mx.random.normal((3, 4, 1, 16)), mx.array([3, 70, 41], dtype=mx.int32)
    with running(Call(positions=offset)):
        found = ours(x, offset)
    assert np.allclose(np.array(found), np.array(plain(x, offset)), atol=2e-6)


@pytest.mark.parametrize("columns", [40, 400])
def test_masked_attention_of_short_rows_is_mlxs(columns: int) -> None:
    queries, keys, values = (
        mx.random.normal(shape)
        for shape in ((8, 4, 1, 16), (8, 2, columns, 16), (8, 2, columns, 16))
    )
    mask = (mx.arange(columns)[None] <= mx.arange(8)[:, None] * 3)[:, None, None]
    right = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=0.3, mask=mask
    )
    for scores in (2**30, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(powers, "FEW_SCORES", scores)
            assert np.allclose(
                np.array(operations.attend(queries, keys, values, 0.3, mask)),
                np.array(right),
                atol=2e-6,
            )


@pytest.fixture
def kernels_built(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The kinds of operations that each step of the engine computes which MLX has fused."""
    seen: list[set[str]] = []
    plain = CompiledDecode.__call__

    def watched(self: CompiledDecode, step: DecodeStep) -> mx.array:
        logits = plain(self, step)
        dot = io.StringIO()
        mx.export_to_dot(dot, logits)
        seen.append(set(re.findall(r"Compiled\w+", dot.getvalue())))
        return logits

    monkeypatch.setattr(CompiledDecode, "__call__", watched)
    return seen


def test_graphs_on_a_cpu_fuse_nothing(
    kernels_built: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel is built while rows decode, and log-probabilities have the bits of steps without a graph."""
    asks = [
        Ask("text:4:9", tokens=12),
        Ask("text:6:14", tokens=7),
        Ask("image:2:1", at=3, tokens=6),
    ]
    graphs: list[Any] = []
    plain = mx.compile

    def watched(function: Any) -> Any:
        graphs.append(function)
        return plain(function)

    monkeypatch.setattr(compiled.mx, "compile", watched)
    steps = run_family("llava", asks, compile_decode=False)
    assert not graphs
    found = run_family("llava", asks, compile_decode=None)
    assert any("CompiledDecode" in repr(function) for function in graphs)
    assert kernels_built and not set().union(*kernels_built)
    for one, other in zip(steps, found, strict=True):
        assert [row.tobytes() for row in one.logprobs] == [
            row.tobytes() for row in other.logprobs
        ]
    check("llava", found)


@pytest.mark.parametrize(
    "name", ["qwen3_5", "lfm2_vl", "falcon_h1", "glm4v", "kimi_vl"]
)
def test_graphs_have_the_bits_of_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent states beside slabs, both in one layer, and experts; rows join and leave."""
    asks = [
        Ask("text:4:9", tokens=12),
        Ask("text:6:14", tokens=7),
        Ask("text:5:12", at=3, tokens=6),
    ]
    graphs: list[CompiledDecode] = []
    plain = CompiledDecode._new

    def watched(self: CompiledDecode, *given: Any) -> Any:
        graphs.append(self)
        return plain(self, *given)

    monkeypatch.setattr(CompiledDecode, "_new", watched)
    steps = run_family(name, asks, compile_decode=False)
    assert not graphs
    found = run_family(name, asks, compile_decode=None)
    assert len(graphs) >= 2 and all(one._is_graph for one in graphs)
    for one, other in zip(steps, found, strict=True):
        assert [row.tobytes() for row in one.logprobs] == [
            row.tobytes() for row in other.logprobs
        ]


def test_graphs_that_were_asked_for_are_fused(kernels_built: list[set[str]]) -> None:
    run_family(
        "llava",
        [Ask("text:4:9", tokens=4), Ask("text:6:14", tokens=4)],
        compile_decode=True,
    )
    assert set().union(*kernels_built)


def test_a_step_that_is_no_graph_goes_on_without_one() -> None:
    """It reads what is computed, so that a trace of it raises. Its slab is as it was, and graphs elsewhere are fused."""

    def decode(step: DecodeStep) -> mx.array:
        layer: Any = step.caches[0]
        layer.update_and_fetch(
            *[mx.full((2, 1, 1, 4), 1.0 + layer.offset.max().item())] * 2
        )
        return mx.exp(step.tokens * 2.0) + 1

    graph = CompiledDecode(decode, 0, is_fused=False, adds_masks=False)
    slab = SlabCache(2)
    single = KVCache()
    single.update_and_fetch(*[mx.zeros((1, 1, 3, 4))] * 2)
    for place in range(2):
        slab.put(place, single)
    step = DecodeStep(
        mx.zeros((2, 1), dtype=mx.int32), mx.zeros(2, dtype=mx.int32), [slab], [{}, {}]
    )
    for _ in range(2):
        assert graph(step).tolist() == [[2.0], [2.0]]
    assert slab.lengths == (5, 5)
    assert slab.keys is not None
    assert slab.keys[0, 0, :6, 0].tolist() == [0, 0, 0, 4, 5, 0]
    elsewhere = mx.compile(lambda x: mx.exp(x * 2.0) + 1)
    dot = io.StringIO()
    mx.export_to_dot(dot, elsewhere(mx.ones(3)))
    assert "Compiled" in dot.getvalue()


def test_who_wants_no_graphs_has_none() -> None:
    """MLX has a switch for the whole process; a graph of ours does not turn it back on."""
    mx.disable_compile()
    try:
        with compiled.unfused():
            pass
        calls: list[None] = []

        def counted(x: mx.array) -> mx.array:
            calls.append(None)
            return x + 1

        one = mx.compile(counted)
        one(mx.zeros(1))
        one(mx.zeros(1))
        assert len(calls) == 2
    finally:
        mx.enable_compile()
    assert can_leave_unfused()


def test_an_mlx_without_the_switch_has_no_graphs_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "SET_MODE", "no_such_function")
    compiled._set_mode.cache_clear()
    try:
        assert not can_leave_unfused()
        engine = engine_of("llava")
        assert engine._decoder._compiled is None
        check(
            "llava",
            run_family("llava", [Ask("text:4:9"), Ask("text:6:14")], generator=engine),
        )
    finally:
        compiled._set_mode.cache_clear()


def test_a_line_that_has_not_changed_is_not_gone_through_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Places are taken and rows ahead are encoded: what waits costs a step nothing until somebody comes, goes or ends."""
    engine = engine_of("llava")
    looks: list[int] = []
    plain = Ledger._made_lines

    def counted(self: Ledger) -> Any:
        looks.append(1)
        return plain(self)

    monkeypatch.setattr(Ledger, "_made_lines", counted)
    asks = [Ask(f"text:{4 + n}:9", tokens=30) for n in range(9)] + [
        Ask("image:2:1", at=5, tokens=3)
    ]
    check("llava", run_family("llava", asks, generator=engine))
    assert 9 < len(looks) < 40  # of some 90 steps
