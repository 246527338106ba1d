"""What adapters change in vision towers for a device's sake: features stay the same, and so does the caller's model."""

from __future__ import annotations

from threading import Thread
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_vlm.models.kimi_vl.vision import apply_rope
from mlx_vlm.models.qwen2_5_vl.vision import apply_rotary_pos_emb_vision

from tests.harness import TOLERANCE, inputs_of, shared_adapter
from tests.zoo import family as tiny_family
from vlm_batch.adapters import operations, windows
from vlm_batch.adapters.cuda import plans
from vlm_batch.adapters.products import products_of, shapes_of
from vlm_batch.adapters.towers import vision_towers
from vlm_batch.arrays import as_mlx
from vlm_batch.models import adapter_for
from vlm_batch.models._qwen2_5_vl import MOST_KEPT, TowerSizes, layout_of

#: Layers of an MLP that are narrowed: outputs of the first ones, inputs of the last.
NARROWED = {
    "qwen2_5_vl": (("gate_proj", "up_proj"), "down_proj"),
    "qwen3_vl": (("linear_fc1",), "linear_fc2"),
}
#: Families whose patches are embedded by a product where launches count.
EMBED_BY_PRODUCT = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_omni_moe",
    "qwen4_exp",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "glm5_next",
)
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
def test_an_inner_width_that_is_slow_is_filled_with_zeros(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = narrowed(name), as_mlx(inputs_of(name, "two:4"))
    given = dict(tree_flatten(model.parameters()))
    right = adapter_for(name)(model)
    monkeypatch.setattr(operations, "fast_width", lambda dtype: plans.FAST_WIDTH)
    filled = adapter_for(name)(model)
    found, expected = (
        np.array(adapter.encode(inputs).inputs_embeds) for adapter in (filled, right)
    )
    assert np.abs(found - expected).max() < TOLERANCE
    width = model.vision_tower.blocks[0].mlp[NARROWED[name][1]].weight.shape[1]
    widths = {product.width for product in products_of(filled.model.vision_tower)}
    assert width % plans.FAST_WIDTH and width not in widths and width + ODD in widths
    # a proof is of the shapes that are run
    assert shapes_of(filled.model) != shapes_of(right.model)
    kept = dict(tree_flatten(model.parameters()))
    assert kept.keys() == given.keys() and all(
        kept[path] is given[path] for path in given
    )


def test_only_dense_layers_whose_width_is_slow_are_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operations, "fast_width", lambda dtype: plans.FAST_WIDTH)
    fast = tiny_family("qwen2_5_vl").build()
    assert shapes_of(
        adapter_for("qwen2_5_vl")(fast).model.vision_tower.tower
    ) == shapes_of(fast.vision_tower)
    few_bits = narrowed("qwen2_5_vl")
    nn.quantize(
        few_bits.vision_tower,
        group_size=32,
        bits=8,
        class_predicate=lambda path, _: path.endswith("gate_proj"),
    )
    assert shapes_of(
        adapter_for("qwen2_5_vl")(few_bits).model.vision_tower.tower
    ) == shapes_of(few_bits.vision_tower)


def test_widths_are_filled_on_cuda_in_half_precision_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operations, "counts_launches", lambda: True)
    assert [
        operations.fast_width(dtype) for dtype in (mx.float16, mx.bfloat16, mx.float32)
    ] == [plans.FAST_WIDTH, plans.FAST_WIDTH, 1]
    monkeypatch.setattr(operations, "counts_launches", lambda: False)
    assert operations.fast_width(mx.bfloat16) == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_a_rotation_is_mlx_vlms_bit_for_bit_and_one_operation_where_launches_count(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "counts_launches", lambda: compiled)
    for number, patches in enumerate((12, 5)):  # compiled once for all sizes
        x = mx.random.normal((patches, 3, 4, 16), key=mx.random.key(number))
        angles = 3 * mx.random.normal((patches, 8), key=mx.random.key(9))
        both = x[:, :2].swapaxes(0, 1)
        found = windows.rotate(both, windows.turn_by(angles))
        right = mx.stack(
            [
                apply_rotary_pos_emb_vision(x[None, :, part], angles)[0]
                for part in (0, 1)
            ]
        )
        assert found.shape == right.shape and np.abs(np.array(found - right)).max() <= (
            1e-6 if compiled else 0
        )
        turned = mx.cos(angles) + 1j * mx.sin(angles)
        found = windows.rotate(both, windows.turn_by_numbers(turned), axis=-1)
        right = mx.stack(apply_rope(x[:, 0], x[:, 1], turned))
        assert (
            found.shape == right.shape and np.abs(np.array(found - right)).max() < 1e-6
        )


def test_a_rotation_of_half_precision_is_rounded_once() -> None:
    x = mx.random.normal((6, 3, 2, 16)).astype(mx.bfloat16)
    angles = mx.random.normal((6, 8))
    found = windows.rotate(x[:, :2].swapaxes(0, 1), windows.turn_by(angles))
    right = mx.stack(
        [apply_rotary_pos_emb_vision(x[None, :, part], angles)[0] for part in (0, 1)]
    )
    assert found.dtype == mx.bfloat16 and bool(mx.all(found == right))


@pytest.mark.parametrize(
    "name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "glm_ocr"]
)
def test_patches_are_embedded_as_by_the_convolution(name: str) -> None:
    theirs: Any = tiny_family(name).build().vision_tower.patch_embed
    ours: Any = adapter_for(name)(
        tiny_family(name).build()
    ).model.vision_tower.patch_embed
    kernel = theirs.proj.weight
    patches = mx.random.normal((7, kernel[0].size), key=mx.random.key(0))
    assert type(ours) is not type(theirs)
    assert np.abs(np.array(ours(patches) - theirs(patches))).max() < 1e-5
    # towers read its type
    assert "proj" in ours and ours.proj.weight.shape == kernel.shape


def test_a_layout_is_made_once_for_a_size_and_holds_in_every_thread() -> None:
    sides = TowerSizes(merge=2, window=4, theta=10000.0, width=8)
    first = layout_of(((1, 12, 20), (2, 6, 4)), sides)
    assert layout_of(((1, 12, 20), (2, 6, 4)), sides) is first
    assert layout_of(((1, 20, 12), (2, 6, 4)), sides) is not first
    large = ((1, 2, MOST_KEPT),)
    assert layout_of(large, sides) is not layout_of(large, sides)
    found: list[float] = []
    thread = Thread(target=lambda: found.append(float((first.turn[0] * 2).sum())))
    thread.start()
    thread.join()
    assert found == [float((first.turn[0] * 2).sum())]


@pytest.mark.parametrize("name", EMBED_BY_PRODUCT)
def test_a_product_embeds_patches_as_the_convolution_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (embed,) = [
        module
        for owner, attribute in vision_towers(shared_adapter(name).model)
        for _, module in owner[attribute].named_modules()
        if type(module).__name__ == "PatchProduct"
    ]
    values = embed.proj.weight.size // len(embed.proj.weight)
    patches = mx.array(
        np.random.default_rng(0).standard_normal((7, values), dtype=np.float32)
    )
    convolved = embed(patches)
    monkeypatch.setattr(operations, "counts_launches", lambda: True)
    assert (
        float(mx.abs(embed(patches).reshape(convolved.shape) - convolved).max()) < 1e-5
    )
