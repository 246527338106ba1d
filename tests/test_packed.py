"""Products in few bits: on a CPU as exact as float32 sums, for any number of rows; on CUDA all rows in one matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_vlm.models.switch_layers import QuantizedSwitchLinear

from tests.zoo import family
from vlm_batch.adapters import operations, packed
from vlm_batch.adapters.cuda import flat
from vlm_batch.adapters.cuda.flat import FlatEmbedding, FlatLinear
from vlm_batch.adapters.experts import FewBitsApart
from vlm_batch.adapters.hooks import running
from vlm_batch.adapters.modules import clone_modules
from vlm_batch.adapters.operations import layers
from vlm_batch.adapters.packed import (
    DequantisedEmbedding,
    DequantisedLinear,
    multiply,
)
from vlm_batch.adapters.products import float32_products, hold_products, products_of
from vlm_batch.adapters.shared import JoinedPart, share_products
from vlm_batch.caches import Placement, kind_of
from vlm_batch.models import adapter_for
from vlm_batch.records import Call, DecodeStep
from vlm_batch.runtime.device import Device

pytestmark = pytest.mark.skipif(
    mx.default_device().type != mx.DeviceType.cpu,
    reason="GPUs have products of few bits that are fast and exact",
)


def layer_of(
    bits: int,
    dtype: mx.Dtype,
    *,
    bias: bool = False,
    outputs: int = 96,
    width: int = 512,
) -> Any:
    layer = nn.QuantizedLinear.from_linear(
        nn.Linear(width, outputs, bias=bias), group_size=64, bits=bits
    )
    layer.set_dtype(dtype)
    mx.eval(layer.parameters())
    return layer


def exact(layer: Any, rows: mx.array) -> np.ndarray:
    """The product in float64."""
    parts = (
        layer.weight,
        layer.scales.astype(mx.float32),
        layer.biases.astype(mx.float32),
    )
    weight = mx.dequantize(*parts, group_size=layer.group_size, bits=layer.bits)
    product = (
        np.array(rows.astype(mx.float32)).astype(np.float64)
        @ np.array(weight).astype(np.float64).T
    )
    return product + (
        np.array(layer.bias.astype(mx.float32)) if "bias" in layer else 0.0
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("count", [1, 3, 4, 33])
def test_a_product_is_exact_to_the_rows_precision(
    bits: int, dtype: mx.Dtype, count: int
) -> None:
    theirs = layer_of(bits, dtype, bias=True)
    ours = clone_modules(theirs, layers())
    assert type(ours) is DequantisedLinear
    rows = mx.random.normal((count, 1, 512)).astype(dtype)
    wanted = exact(theirs, rows)
    found = np.array(ours(rows).astype(mx.float32))
    rounding = {mx.float32: 2e-6, mx.bfloat16: 2**-7, mx.float16: 2**-10}[dtype]
    assert found.shape == (count, 1, 96) and ours(rows).dtype == dtype
    assert np.abs(found - wanted).max() <= rounding * np.abs(wanted).max()


def test_mlx_sums_in_bfloat16() -> None:
    """The reason for ``DequantisedLinear`` in half precision: MLX's own product is ten times farther off."""
    theirs = layer_of(4, mx.bfloat16, width=2048)
    rows = mx.random.normal((4, 2048)).astype(mx.bfloat16)
    wanted = exact(theirs, rows)
    off = [
        np.abs(np.array(layer(rows).astype(mx.float32)) - wanted).mean()
        for layer in (theirs, clone_modules(theirs, layers()))
    ]
    assert off[0] > 10 * off[1]


def test_parts_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that are widened in parts, the last of them smaller."""
    layer, rows = layer_of(4, mx.float32, outputs=100), mx.random.normal((2, 8, 512))
    whole = multiply(rows, layer)
    monkeypatch.setattr(packed, "PART", 512 * 30)
    parts = multiply(rows, layer)
    assert whole is not None and parts is not None
    assert mx.allclose(whole, parts, atol=1e-5) and parts.shape == (2, 8, 100)


def peak_of(product: Callable[[], mx.array]) -> int:
    """The bytes that making an array takes at most."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(product())
    return mx.get_peak_memory() - before


def test_few_parts_are_wide_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX would widen all that it can before the first product: 0.5 GB for a head of 64,000 words."""
    layer = layer_of(4, mx.float32, outputs=8192, width=512)
    rows = mx.random.normal((8, 512))
    mx.eval(rows)
    monkeypatch.setattr(packed, "PART", 512 * 256)  # 32 parts of 0.5 MB
    assert peak_of(lambda: DequantisedLinear.__call__(layer, rows)) < 8192 * 512 * 4 / 3


def test_few_experts_are_wide_at_a_time() -> None:
    layer = QuantizedSwitchLinear(512, 256, 32, bias=False, group_size=64, bits=4)
    layer.__class__ = FewBitsApart
    rows, experts = mx.random.normal((256, 1, 512)), mx.arange(256) // 8
    mx.eval(layer.parameters(), rows, experts)
    with running(Call()):
        assert (
            peak_of(lambda: layer(rows, experts, sorted_indices=True))
            < 32 * 256 * 512 * 4 / 3
        )


def test_other_layouts_are_left_to_mlx() -> None:
    linear = nn.Linear(512, 64, bias=False)
    layer: Any = nn.QuantizedLinear.from_linear(
        linear, group_size=32, bits=4, mode="mxfp4"
    )
    ours, rows = clone_modules(layer, layers()), mx.random.normal((8, 512))
    assert multiply(rows, layer) is None
    assert mx.array_equal(ours(rows), layer(rows))


def test_tied_heads_are_products_too() -> None:
    table: Any = nn.QuantizedEmbedding.from_embedding(
        nn.Embedding(300, 512), group_size=64, bits=4
    )
    ours = clone_modules(table, layers())
    rows, ids = mx.random.normal((8, 512)), mx.array([3, 299])
    assert type(ours) is DequantisedEmbedding
    assert mx.array_equal(ours(ids), table(ids))
    assert mx.allclose(ours.as_linear(rows), table.as_linear(rows), atol=1e-3)


def in_4_bits(name: str) -> Any:
    model = family(name).build()
    nn.quantize(
        model,
        group_size=32,
        bits=4,
        class_predicate=lambda _, one: (
            isinstance(one, nn.Linear) and one.weight.shape[1] % 32 == 0
        ),
    )
    return model


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen3_5"])
def test_a_model_in_4_bits_has_them_and_the_callers_model_does_not(name: str) -> None:
    model = in_4_bits(name)
    adapter = adapter_for(family(name).registered)(model)
    kinds = {type(module) for _, module in adapter.model.named_modules()}
    assert DequantisedLinear in kinds and nn.QuantizedLinear not in kinds
    assert DequantisedLinear not in {
        type(module) for _, module in model.named_modules()
    }


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Layers as on CUDA; the shapes of the rows that MLX's products of few bits get."""
    shapes: list[tuple[int, ...]] = []
    theirs = mx.quantized_matmul

    def product(rows: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        shapes.append(rows.shape)
        return theirs(rows, *args, **kwargs)

    monkeypatch.setattr(operations, "device", lambda: Device.CUDA)
    monkeypatch.setattr(mx, "quantized_matmul", product)
    return shapes


@pytest.mark.parametrize("shape", [(512,), (5, 512), (4, 1, 512), (2, 3, 5, 512)])
def test_rows_are_one_matrix_on_cuda(
    shape: tuple[int, ...], as_on_cuda: list[tuple[int, ...]]
) -> None:
    linear = layer_of(4, mx.float32, bias=True)
    table: Any = nn.QuantizedEmbedding.from_embedding(
        nn.Embedding(300, 512), group_size=64, bits=4
    )
    flat_linear, flat_table = (
        clone_modules(layer, layers()) for layer in (linear, table)
    )
    assert (type(flat_linear), type(flat_table)) == (FlatLinear, FlatEmbedding)
    rows = mx.random.normal(shape)
    for wanted, product in (
        (linear, flat_linear),
        (table.as_linear, flat_table.as_linear),
    ):
        found, given = product(rows), as_on_cuda[-1]
        assert len(given) <= 2 and given[-1] == 512
        answer = wanted(rows)
        assert found.shape == answer.shape and mx.array_equal(found, answer)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_many_rows_have_wide_weights_on_cuda(
    dtype: mx.Dtype,
    bias: bool,
    as_on_cuda: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts in one array; a thread waits when it has launched as much as it may."""
    waits: list[Any] = []
    evaluate = mx.eval
    monkeypatch.setattr(flat, "MOST_WIDE", 3 * 96 * 512 * 2)
    layer: Any = clone_modules(layer_of(4, dtype, bias=bias), layers())
    rows = mx.random.normal((2, flat.MANY_ROWS // 2 + 1, 512)).astype(dtype)

    def waiting(*arrays: Any) -> None:
        waits.append(arrays)
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", waiting)
    flat._launched.bytes = 0
    found = [layer(rows) for _ in range(7)]
    assert len(waits) == 2 and not as_on_cuda
    wanted = exact(layer, rows)
    rounding = {mx.bfloat16: 2**-7, mx.float16: 2**-10}[dtype]
    assert all(
        one.shape == (*rows.shape[:2], 96) and one.dtype == dtype for one in found
    )
    assert (
        np.abs(np.array(found[-1].astype(mx.float32)) - wanted).max()
        <= rounding * np.abs(wanted).max()
    )
    layer(rows[:, 1:])  # fewer
    with running(Call(positions=mx.array([5]))):  # a decode step
        layer(rows)
    assert as_on_cuda == [(flat.MANY_ROWS - 1, 512), (flat.MANY_ROWS + 1, 512)]


def test_the_proof_of_products_has_the_layers_of_cuda(
    as_on_cuda: list[tuple[int, ...]],
) -> None:
    """Of rows in float32 that a packed layer gets, too, whatever its model's precision."""
    product = float32_products([(512, 96, (64, 4, "affine"))])[0]
    product.call(product.rows(5))
    assert as_on_cuda == [(5, 512)]


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("how", ["own", "joined", "held"])
def test_a_decode_step_on_cuda_has_no_product_for_each_row(
    name: str, how: str, as_on_cuda: list[tuple[int, ...]]
) -> None:
    adapter = adapter_for(family(name).registered)(in_4_bits(name))
    if how == "joined":
        assert share_products(adapter) and any(
            isinstance(one, JoinedPart) for one in adapter.language.modules()
        )
    elif how == "held":
        hold_products(
            adapter.language,
            dict.fromkeys(map(str, products_of(adapter.language)), (2, 4)),
        )
    layers: list[Any] = []
    encoded = adapter.encode({"input_ids": mx.array([[3, 4, 5]])})
    for place in range(3):
        cache = adapter.make_cache()
        adapter.prefill([encoded], cache, 0, 3)
        adapter.finish_prefill(encoded, cache)
        layers = layers or [
            kind_of(single).batched(Placement.SLAB, 3) for single in cache
        ]
        for layer, single in zip(layers, cache, strict=True):
            layer.resize(3)
            layer.put(place, single)
    as_on_cuda.clear()
    step = DecodeStep(
        mx.array([[4]] * 3), mx.array([3] * 3), layers, [encoded.decode] * 3
    )
    mx.eval(adapter.decode(step))
    assert as_on_cuda and {shape[:-1] for shape in as_on_cuda} == {
        (4,) if how == "held" else (3,)
    }
