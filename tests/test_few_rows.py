"""Products of few rows with large matrices: the bits of MLX's own layers, where OpenBLAS gains."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.harness import Ask, check, inputs_of, run
from tests.zoo import family
from vlm_batch.adapters import few_rows, products
from vlm_batch.adapters.few_rows import (
    FewRowsEmbedding,
    FewRowsLinear,
    multiply,
    suit_few_rows,
)
from vlm_batch.adapters.modules import clone_modules
from vlm_batch.adapters.shared import share_products
from vlm_batch.caches import Placement
from vlm_batch.models import adapter_for
from vlm_batch.runtime import blas

IS_CPU = mx.default_device().type == mx.DeviceType.cpu
IS_HERE = (
    IS_CPU
    and blas.facts()["core"] == "SkylakeX"
    and blas.version() in few_rows.VERSIONS
)
needs_kernels = pytest.mark.skipif(
    not IS_HERE,
    reason="only the AVX-512 kernels of known OpenBLAS gain and keep the bits",
)


class Layers(nn.Module):
    def __init__(self, width: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.linear, self.table = (
            nn.Linear(width, outputs, bias=bias),
            nn.Embedding(outputs, width),
        )
        mx.eval(self.parameters())


#: Inputs and outputs: one block and several of each size, and outputs that are no multiple of a block.
WIDE = [
    (1024, 512),
    (1024, 3072),
    (3072, 200),
    (2048, 768),
    (5120, 130),
    (1024, 1152),
    (1024, 640),
    (2048, 384),
]


def suited(model: nn.Module) -> Any:
    copy = clone_modules(model)
    suit_few_rows(copy)
    return copy


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    library, before = blas._loaded, int(blas.facts()["threads"])
    assert library is not None
    library.openblas_set_num_threads(ctypes.c_int(request.param))
    yield request.param
    library.openblas_set_num_threads(ctypes.c_int(before))


@needs_kernels
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("width", "outputs"), WIDE)
def test_the_bits_are_those_of_mlx(
    width: int, outputs: int, bias: bool, threads: int
) -> None:
    theirs = Layers(width, outputs, bias)
    ours = suited(theirs)
    assert type(ours.linear) is FewRowsLinear and type(ours.table) is FewRowsEmbedding
    assert type(theirs.linear) is nn.Linear
    for count in (*range(1, 18), 31, 64, 65, 130):
        for shape in ((count, width), (count, 1, width), (1, count, width)):
            rows = mx.random.normal(shape)
            product: Any = ours.linear(rows)
            assert mx.array_equal(product, theirs.linear(rows)), shape
            assert memoryview(product).c_contiguous  # what follows is slow over columns
        assert mx.array_equal(ours.table.as_linear(rows), theirs.table.as_linear(rows))


@needs_kernels
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("width", "outputs"), [(600, 512), (600, 2048), (2560, 384), (130, 1000)]
)
def test_blocks_of_outputs_have_the_bits_of_mlx(
    width: int, outputs: int, bias: bool
) -> None:
    layer = nn.Linear(width, outputs, bias=bias)
    for count in (*range(1, 18), 64):
        rows = mx.random.normal((count, 1, width))
        assert mx.array_equal(
            multiply(rows, layer.weight, layer.get("bias")), layer(rows)
        ), count


@needs_kernels
def test_what_does_not_gain_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(width: int, outputs: int, change: Any = None) -> type:
        layers = Layers(width, outputs, bias=False)
        if change is not None:
            layers.linear.weight = change(layers.linear.weight)
            mx.eval(layers.linear.weight)
        return type(suited(layers).linear)

    assert kind(512, 512) is nn.Linear  # too small
    assert kind(1024, 64) is nn.Linear  # of too few outputs
    assert kind(1024, 512, lambda weight: weight.astype(mx.bfloat16)) is nn.Linear
    # its rows do not lie one after another
    assert kind(512, 1024, lambda weight: weight.T) is nn.Linear
    layers = Layers(1024, 512, bias=True)
    layers.linear.bias = mx.zeros((1,))
    assert type(suited(layers).linear) is nn.Linear
    del layers.linear["weight"]
    assert type(suited(layers).linear) is nn.Linear
    monkeypatch.setattr(few_rows, "LARGE", 512 * 512)
    assert kind(512, 512) is FewRowsLinear  # large
    assert kind(512, 511) is nn.Linear
    assert kind(520, 512) is nn.Linear  # of a width that threads would divide unevenly
    with monkeypatch.context() as patch:
        patch.setattr(blas, "version", lambda: "0.3.31")  # other bits there
        assert kind(1024, 512) is nn.Linear
    monkeypatch.setattr(blas, "facts", lambda: {"core": "Haswell", "threads": "1"})
    assert kind(1024, 512) is nn.Linear  # other bits there


@needs_kernels
def test_rows_of_other_precisions_and_prompts_take_mlx_own_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = suited(Layers(1024, 128, bias=False))
    monkeypatch.setattr(few_rows, "multiply", None)  # raises where it is called
    half = mx.random.normal((4, 1024)).astype(mx.bfloat16)
    many = mx.random.normal((few_rows.MOST_ROWS + 1, 1024))
    for rows in (half, many):
        mx.eval(layers.linear(rows), layers.table.as_linear(rows))
    with pytest.raises(TypeError):
        layers.linear(many[:1])


@needs_kernels
def test_counts_of_rows_are_held_for_them_too() -> None:
    """``reproducible=True`` treats these layers as it treats MLX's."""
    model = suited(Layers(1024, 128, bias=True))
    found = products.products_of(model)
    assert {type(product.layer) for product in found} == {
        FewRowsLinear,
        FewRowsEmbedding,
    }
    products.hold_products(model, {str(product): (4,) for product in found})
    assert {type(model.linear), type(model.table)} <= set(products.PLAIN)
    rows = mx.random.normal((3, 1, 1024))
    assert mx.array_equal(model.linear(rows), nn.Linear.__call__(model.linear, rows))
    products.hold_products(model, {})
    assert (type(model.linear), type(model.table)) == (FewRowsLinear, FewRowsEmbedding)


@needs_kernels
def test_layers_that_gain_and_others_are_joined_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queries have 64 outputs, keys and values 32: the joined layer gains, where each by itself may not."""
    monkeypatch.setattr(few_rows, "ALIASED", 64)
    monkeypatch.setattr(few_rows, "BLOCKS", (64, 48))
    adapter = adapter_for(family("llava").registered)(family("llava").build())
    first = adapter.language.model.layers[0].self_attn
    assert (type(first.q_proj), type(first.k_proj)) == (FewRowsLinear, nn.Linear)
    assert share_products(adapter) > 0
    assert (
        type(first.q_proj.wide.linear) is FewRowsLinear
        and first.q_proj.wide.linear.weight.shape[0] == 128
    )


@needs_kernels
@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_vl", "qwen3_5"])
def test_models_answer_as_alone(
    name: str, placement: Placement, is_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With narrow layers taken for wide ones. Not by bits: who shares a step goes by time."""
    asks = [
        Ask("image:3:2"),
        Ask("text:4:9", at=2),
        Ask("image:1:0", at=3),
        Ask("text:5:26", at=5),
    ]
    monkeypatch.setattr(few_rows, "ALIASED", 32)
    monkeypatch.setattr(few_rows, "BLOCKS", (64, 32, 16))
    adapter = adapter_for(family(name).registered)(family(name).build())
    assert [type(module) for module in adapter.language.modules()].count(
        FewRowsLinear
    ) > 3
    check(
        name,
        run(
            adapter,
            partial(inputs_of, name),
            asks,
            placement=placement,
            compile_decode=is_graph,
        ),
    )
