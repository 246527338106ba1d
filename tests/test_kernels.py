"""Attention and activations by the cheaper way are MLX's own to rounding; pictures' windows are mlx-vlm's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.activations import swiglu
from mlx_vlm.models.qwen2_5_vl.vision import VisionModel

from tests.zoo import family
from vlm_batch.adapters import kernels
from vlm_batch.models._qwen2_5_vl import WindowRuns

SCALE = 0.25


def largest(found: mx.array, right: mx.array) -> float:
    assert found.shape == right.shape
    return float(np.abs(np.array(found - right)).max())


@pytest.fixture(autouse=True)
def seeded() -> None:
    mx.random.seed(0)


def random(*shapes: tuple[int, ...]) -> list[mx.array]:
    return [mx.random.normal(shape) for shape in shapes]


@pytest.mark.parametrize("kind", ["causal", "none", "bool", "added"])
@pytest.mark.parametrize(("length", "columns", "heads"), [(20, 20, 8), (5, 150, 8), (130, 140, 2), (1, 9, 8)])
def test_spelled_out_attention_is_mlxs(length: int, columns: int, heads: int, kind: str) -> None:
    queries, keys, values = random((3, heads, length, 16), (3, 2, columns, 16), (3, 2, columns, 24))
    masks: dict[str, Any] = {
        "causal": "causal",
        "none": None,
        "bool": (mx.random.uniform(shape=(3, 1, length, columns)) > 0.4) | (mx.arange(columns) == 0),
        "added": mx.random.normal((3, heads, length, columns)),
    }
    right = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=masks[kind])
    assert largest(kernels.attend_spelled_out(queries, keys, values, SCALE, masks[kind]), right) < 2e-6
    if kind in ("causal", "none"):
        found = kernels.attend_in_blocks(queries, keys, values, SCALE, is_causal=kind == "causal")
        assert largest(found, right) < 2e-6
    assert largest(kernels.attend(queries, keys, values, SCALE, masks[kind]), right) < 2e-6


@pytest.mark.parametrize("scores", [2**25, 2**9], ids=["whole", "in parts"])
def test_a_towers_attention_by_queries_is_mlxs(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK_SCORES", scores)
    queries, keys, values = random((2, 4, 37, 16), (2, 4, 37, 16), (2, 4, 37, 16))
    right = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE)
    assert largest(kernels.attend_by_queries(queries, keys, values, SCALE), right) < 2e-6


def test_a_tower_makes_plans_for_shapes_that_keep_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones after fewer uses; where kernels go by shapes, for all that are large and none with few keys."""
    monkeypatch.setattr(kernels, "takes_plans", lambda queries: True)
    monkeypatch.setattr(kernels, "_uses", Counter())
    monkeypatch.setattr(kernels, "SCORES_BEFORE_PLAN", 100 * 256**2)
    monkeypatch.setattr(kernels, "MAX_SCORES", 1000)
    spelled: list[int] = []
    plain = kernels.attend_by_queries

    def noted(queries: mx.array, *rest: Any) -> mx.array:
        spelled.append(queries.shape[2])
        return plain(queries, *rest)

    monkeypatch.setattr(kernels, "attend_by_queries", noted)
    for length in (256, 512, 64):
        for _ in range(120):
            queries, keys, values = random(*[(1, 1, length, 8)] * 3)
            kernels.attend_all(queries, keys, values, SCALE)
    assert Counter(spelled) == {256: 100, 512: 25, 64: 120}
    spelled.clear()
    monkeypatch.setattr(kernels, "goes_by_shapes", lambda: True)
    for length in (256, 64):
        queries, keys, values = random(*[(9, 1, length, 8)] * 3)
        kernels.attend_all(queries, keys, values, SCALE)
    assert spelled == [64]
    monkeypatch.setattr(kernels, "goes_by_shapes", lambda: False)
    spelled.clear()
    queries, keys, values = random(*[(3, 1, 300, 8)] * 3)  # one by one: a plan then holds for any number of them
    right = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE)
    assert largest(kernels.attend_all(queries, keys, values, SCALE), right) < 2e-6
    assert spelled == [300] * 3


@pytest.mark.parametrize(("heads", "columns", "is_ours"), [(2, 511, False), (2, 512, True), (8, 9, True)])
def test_one_query_over_many_keys_or_of_many_heads_is_mlxs(heads: int, columns: int, is_ours: bool) -> None:
    queries, keys, values = random((3, heads, 1, 16), (3, 2, columns, 16), (3, 2, columns, 24))
    assert kernels.is_long(queries, keys) is is_ours
    right = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE)
    assert largest(kernels.attend(queries, keys, values, SCALE), right) < 2e-6
    far = kernels.attend(100 * queries, keys, values, SCALE)  # scores in the hundreds
    assert largest(far, mx.fast.scaled_dot_product_attention(100 * queries, keys, values, scale=SCALE)) < 2e-5


@pytest.mark.parametrize("is_bool", [True, False])
def test_queries_of_a_group_see_the_same_columns(is_bool: bool) -> None:
    queries, keys, values = random((3, 8, 1, 16), (3, 2, 20, 16), (3, 2, 20, 16))
    mask = (mx.arange(20) < mx.array([3, 20, 9])[:, None])[:, None, None]
    mask = mask if is_bool else mx.where(mask, 0.0, -1e30)
    assert kernels.is_groupable(queries, keys, mask)
    right = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=mask)
    assert largest(kernels.attend_groups(queries, keys, values, SCALE, mask), right) < 2e-6


def test_a_shape_gets_a_plan_once_it_keeps_coming_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "USES_BEFORE_PLAN", 2)
    monkeypatch.setattr(kernels, "_uses", type(kernels._uses)())
    queries, keys = random((1, 2, 7, 8), (1, 2, 9, 8))
    assert [kernels.is_rare(queries, keys) for _ in range(4)] == [True, True, False, False]
    assert not kernels.is_rare(mx.zeros((1, 64, 2048, 8)), mx.zeros((1, 64, 2048, 8)))  # too many scores


def test_swiglu_is_mlx_vlms_and_holds_far_out() -> None:
    gate, x = random((64, 96), (64, 96))
    gate = mx.concatenate([30 * gate, mx.array([[-200.0, 200.0] * 48])])
    x = mx.concatenate([x, mx.ones((1, 96))])
    assert largest(kernels.swiglu(gate, x), swiglu(gate, x)) < 1e-5


class DistinctWindows(VisionModel):  # type: ignore[misc,valid-type]
    """mlx-vlm's tower without windows of length zero, which it keeps: it compares array scalars by identity."""

    def get_window_index(self, grid_thw: mx.array) -> tuple[mx.array, mx.array]:
        index, boundaries = super().get_window_index(grid_thw)
        return index, mx.array(sorted(set(boundaries.tolist())), dtype=mx.int32)


@pytest.mark.parametrize("grids", [[[1, 8, 8]], [[1, 6, 10], [1, 4, 4]], [[1, 8, 8]] * 3, [[2, 6, 4]]])
def test_windows_of_one_size_in_one_call_see_what_mlx_vlms_see(grids: list[list[int]]) -> None:
    tower: Any = family("qwen2_5_vl").build().vision_tower
    config = tower.config
    patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
    pixels = mx.random.normal((sum(t * h * w for t, h, w in grids), patch))
    found = []
    for changed in (WindowRuns, DistinctWindows):
        tower.__class__ = changed
        found.append(tower(pixels, mx.array(grids)))
    assert largest(found[0], found[1]) < 1e-5


def test_what_is_made_of_a_mask_goes_with_it() -> None:
    mask = mx.array([[True, False]])
    made = kernels.added(mask, mx.float32)
    assert kernels.added(mask, mx.float32) is made
    other = mx.array([[False, True]])
    kept = kernels.added(other, mx.float16)
    del mask  # another has come since
    assert kernels.added(other, mx.float16) is kept
    del other
    assert kernels._last_added is None
