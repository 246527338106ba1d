"""What adapters change in vision towers for a device's sake: features stay the same, and so does the caller's model."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.harness import TOLERANCE, inputs_of
from tests.zoo import family as tiny_family
from vlm_batch.adapters import kernels
from vlm_batch.adapters.products import products_of, shapes_of
from vlm_batch.arrays import as_mlx
from vlm_batch.models import adapter_for

#: Layers of an MLP that are narrowed: outputs of the first ones, inputs of the last.
NARROWED = {"qwen2_5_vl": (("gate_proj", "up_proj"), "down_proj"), "qwen3_vl": (("linear_fc1",), "linear_fc2")}
ODD = 3  # how many columns are taken away


def narrowed(name: str) -> Any:
    """A family's tiny model, the inner width of whose tower is no multiple of 8."""
    model: Any = tiny_family(name).build()
    first, last = NARROWED[name]
    for block in model.vision_tower.blocks:
        for layer in (block.mlp[one] for one in first):
            layer.weight, layer.bias = layer.weight[:-ODD], layer.bias[:-ODD]
        block.mlp[last].weight = block.mlp[last].weight[:, :-ODD]
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("name", NARROWED)
def test_an_inner_width_that_is_slow_is_filled_with_zeros(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = narrowed(name), as_mlx(inputs_of(name, "two:4"))
    given = dict(tree_flatten(model.parameters()))
    right = adapter_for(name)(model)
    monkeypatch.setattr(kernels, "wants_fast_widths", lambda dtype: True)
    filled = adapter_for(name)(model)
    found, expected = (np.array(adapter.encode(inputs).inputs_embeds) for adapter in (filled, right))
    assert np.abs(found - expected).max() < TOLERANCE
    width = model.vision_tower.blocks[0].mlp[NARROWED[name][1]].weight.shape[1]
    widths = {product.width for product in products_of(filled.model.vision_tower)}
    assert width % kernels.FAST_WIDTH and width not in widths and width + ODD in widths
    assert shapes_of(filled.model) != shapes_of(right.model)  # a proof is of the shapes that are run
    kept = dict(tree_flatten(model.parameters()))
    assert kept.keys() == given.keys() and all(kept[path] is given[path] for path in given)


def test_only_dense_layers_whose_width_is_slow_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "wants_fast_widths", lambda dtype: True)
    fast = tiny_family("qwen2_5_vl").build()
    assert shapes_of(adapter_for("qwen2_5_vl")(fast).model.vision_tower) == shapes_of(fast.vision_tower)
    few_bits = narrowed("qwen2_5_vl")
    nn.quantize(
        few_bits.vision_tower, group_size=32, bits=8, class_predicate=lambda path, _: path.endswith("gate_proj")
    )
    assert shapes_of(adapter_for("qwen2_5_vl")(few_bits).model.vision_tower) == shapes_of(few_bits.vision_tower)


def test_widths_are_filled_on_cuda_in_half_precision_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "counts_launches", lambda: True)
    assert [kernels.wants_fast_widths(dtype) for dtype in (mx.float16, mx.bfloat16, mx.float32)] == [True, True, False]
    monkeypatch.setattr(kernels, "counts_launches", lambda: False)
    assert not kernels.wants_fast_widths(mx.bfloat16)
