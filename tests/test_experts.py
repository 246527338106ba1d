"""Experts' products of a prompt: the same as mlx-vlm's, one an expert, and left alone where a graph or a promise needs that."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from tests.harness import shared_adapter
from vlm_batch.adapters.experts import ExpertsApart, FewBitsApart, multiplies_apart
from vlm_batch.adapters.hooks import running
from vlm_batch.records import Call

NUM_EXPERTS, WIDTH = 4, 24
on_a_cpu = pytest.mark.skipif(
    mx.default_device() != mx.Device(mx.cpu), reason="gather_mm is fast on a GPU"
)


def apart(block: SwitchGLU) -> SwitchGLU:
    for part in (block.gate_proj, block.up_proj, block.down_proj):
        part.__class__ = ExpertsApart
    return block


@on_a_cpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("used", [[0, 1, 2, 3], [2], [0, 3]], ids=str)
def test_the_sums_are_mlx_vlms(bias: bool, used: list[int]) -> None:
    """Also where an expert has no row."""
    mx.random.seed(3)
    block = SwitchGLU(WIDTH, 32, NUM_EXPERTS, bias=bias)
    block.eval()
    random = np.random.default_rng(1)
    x = mx.array(random.standard_normal((1, 50, WIDTH)), dtype=mx.float32)
    indices = mx.array(random.choice(used, (1, 50, 2)))
    wanted = block(x, indices)
    with (
        running(Call()),
        patch.object(SwitchLinear, "__call__", side_effect=AssertionError),
    ):
        found = apart(block)(x, indices)
    np.testing.assert_allclose(np.array(found), np.array(wanted), atol=1e-6)


@on_a_cpu
@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@pytest.mark.parametrize("used", [[0, 1, 2, 3], [2], [0, 3]], ids=str)
def test_sums_of_few_bits_are_mlx_vlms(used: list[int], mode: str) -> None:
    """Experts of one row and of many."""
    mx.random.seed(3)
    layer = QuantizedSwitchLinear(
        64, 96, NUM_EXPERTS, bias=mode == "affine", group_size=32, bits=4, mode=mode
    )
    if "bias" in layer:
        layer.bias = mx.random.normal(layer.bias.shape)
    random = np.random.default_rng(1)
    experts = mx.array(np.sort(np.append(random.choice(used, 40), [1])))
    x = mx.array(random.standard_normal((41, 1, 64)), dtype=mx.float32)
    wanted = layer(x, experts, sorted_indices=True)
    layer.__class__ = FewBitsApart
    with (
        running(Call()),
        patch.object(QuantizedSwitchLinear, "__call__", side_effect=AssertionError),
    ):
        found = layer(x, experts, sorted_indices=True)
    np.testing.assert_allclose(np.array(found), np.array(wanted), atol=1e-5)


@on_a_cpu
def test_where_a_products_shape_must_not_depend_on_the_experts() -> None:
    """A decode step may be a graph, whose experts are not known; a reproducible call has one shape."""
    rows, experts = mx.zeros((64, 1, WIDTH)), mx.zeros((64,), mx.int32)

    def is_apart(
        call: Call, rows: mx.array = rows, experts: mx.array = experts
    ) -> bool:
        with running(call):
            return multiplies_apart(rows, experts, NUM_EXPERTS)

    assert is_apart(Call())
    assert not is_apart(Call(is_fixed=True))
    assert not is_apart(Call(positions=mx.zeros((64,), mx.int32)))
    assert not is_apart(Call(), rows.astype(mx.bfloat16))
    assert not is_apart(Call(), rows[:7], experts[:7])


@pytest.mark.parametrize("name", ["qwen3_omni_moe", "qwen3_vl_moe"])
def test_families_with_experts_have_them_apart(name: str) -> None:
    modules: list[Any] = [
        module for _, module in shared_adapter(name).model.named_modules()
    ]
    found = [type(module) for module in modules if isinstance(module, SwitchLinear)]
    assert found and set(found) == {ExpertsApart}
