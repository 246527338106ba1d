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
from vlm_batch.adapters import masks, operations, powers, windows
from vlm_batch.adapters.cuda import plans
from vlm_batch.adapters.cuda import windows as cuda_windows
from vlm_batch.models._qwen2_5_vl import WindowRuns
from vlm_batch.records import Call

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
@pytest.mark.parametrize(
    ("length", "columns", "heads"), [(20, 20, 8), (5, 150, 8), (130, 140, 2), (1, 9, 8)]
)
def test_spelled_out_attention_is_mlxs(
    length: int, columns: int, heads: int, kind: str
) -> None:
    queries, keys, values = random(
        (3, heads, length, 16), (3, 2, columns, 16), (3, 2, columns, 24)
    )
    masks: dict[str, Any] = {
        "causal": "causal",
        "none": None,
        "bool": (mx.random.uniform(shape=(3, 1, length, columns)) > 0.4)
        | (mx.arange(columns) == 0),
        "added": mx.random.normal((3, heads, length, columns)),
    }
    right = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=SCALE, mask=masks[kind]
    )
    assert (
        largest(plans.attend_unfused(queries, keys, values, SCALE, masks[kind]), right)
        < 2e-6
    )
    if length == 1 and kind in ("causal", "none"):
        found = powers.attend_step(queries, keys, values, SCALE, masks[kind])
        assert largest(found, right) < 2e-6
    assert (
        largest(operations.attend(queries, keys, values, SCALE, masks[kind]), right)
        < 2e-6
    )


@pytest.mark.parametrize("scores", [2**25, 2**12], ids=["whole", "in parts"])
@pytest.mark.parametrize(("length", "columns"), [(37, 37), (20, 70)])
def test_a_prompts_attention_before_it_has_a_plan_is_mlxs(
    length: int, columns: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "PROMPT_SCORES", scores)
    queries, keys, values = random(
        (2, 8, length, 16), (2, 2, columns, 16), (2, 2, columns, 24)
    )
    right = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=SCALE, mask="causal"
    )
    assert largest(plans.attend_before(queries, keys, values, SCALE), right) < 2e-6


def test_large_prompts_are_spelled_out_until_a_plan_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operations, "counts_launches", lambda: True)
    monkeypatch.setattr(plans, "takes_plans", lambda queries: True)
    monkeypatch.setattr(plans, "MAX_SCORES", 100)
    monkeypatch.setattr(plans, "NUMBERS_BEFORE_PLAN", 3 * 8 * 30 * 30)
    monkeypatch.setattr(plans, "_uses", Counter())
    ways: list[str] = []
    plain = plans.attend_before

    def watched(*args: Any) -> mx.array:
        ways.append("before")
        return plain(*args)

    monkeypatch.setattr(plans, "attend_before", watched)
    queries, keys, values = random((1, 8, 30, 16), (1, 2, 30, 16), (1, 2, 30, 16))
    for _ in range(5):
        operations.attend(queries, keys, values, SCALE, "causal")
    assert len(ways) == 3
    monkeypatch.setattr(plans, "MAX_PROMPT_SCORES", 8 * 31 * 31 - 1)
    queries, keys, values = random((1, 8, 31, 16), (1, 2, 31, 16), (1, 2, 31, 16))
    operations.attend(queries, keys, values, SCALE, "causal")
    assert len(ways) == 3, "the scores of the largest would take too much memory"


@pytest.mark.parametrize("scores", [2**25, 2**9], ids=["whole", "in parts"])
def test_a_towers_attention_by_queries_is_mlxs(
    scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "BLOCK_SCORES", scores)
    queries, keys, values = random((2, 4, 37, 16), (2, 4, 37, 16), (2, 4, 37, 16))
    right = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE)
    assert largest(plans.attend_by_queries(queries, keys, values, SCALE), right) < 2e-6


@pytest.fixture
def spelled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of a tower's attention that were spelled out, on a device that makes plans."""
    monkeypatch.setattr(operations, "counts_launches", lambda: True)
    monkeypatch.setattr(plans, "takes_plans", lambda queries: True)
    monkeypatch.setattr(plans, "_uses", Counter())
    monkeypatch.setattr(plans, "_filled", set())
    monkeypatch.setattr(plans, "NUMBERS_OF_PATCH", 0)
    monkeypatch.setattr(plans, "NUMBERS_BEFORE_PLAN", 100 * 256**2)
    monkeypatch.setattr(plans, "MAX_SCORES", 1000)
    found: list[int] = []
    plain = plans.attend_by_queries

    def noted(queries: mx.array, *rest: Any) -> mx.array:
        found.append(queries.shape[2])
        return plain(queries, *rest)

    monkeypatch.setattr(plans, "attend_by_queries", noted)
    return found


def test_a_tower_makes_plans_for_shapes_that_keep_coming(
    spelled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones after fewer uses; where kernels go by shapes, for all that are large and none with few keys."""
    for length in (256, 512, 64):
        for _ in range(120):
            queries, keys, values = random(*[(1, 1, length, 8)] * 3)
            operations.attend_all(queries, keys, values, SCALE)
    assert Counter(spelled) == {256: 100, 512: 25, 64: 120}
    spelled.clear()
    monkeypatch.setattr(plans, "current", lambda: Call(is_fixed=True))
    for length in (256, 64):
        queries, keys, values = random(*[(9, 1, length, 8)] * 3)
        operations.attend_all(queries, keys, values, SCALE)
    assert spelled == [64]
    monkeypatch.setattr(plans, "current", lambda: Call(is_fixed=False))
    spelled.clear()
    # one by one: a plan then holds for any number of them
    queries, keys, values = random(*[(3, 1, 300, 8)] * 3)
    right = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE)
    assert largest(operations.attend_all(queries, keys, values, SCALE), right) < 2e-6
    assert spelled == [300] * 3


def test_pictures_of_many_sizes_are_filled_up_to_few(
    spelled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A length of its own is planned at once where one size comes, and late where its neighbours have been filled up."""
    planned: list[int] = []
    plain = plans.attend_filled

    def noted(
        queries: mx.array, keys: mx.array, values: mx.array, length: int, scale: float
    ) -> mx.array:
        planned.append(length)
        return plain(queries, keys, values, length, scale)

    monkeypatch.setattr(plans, "attend_filled", noted)
    monkeypatch.setattr(plans, "FILLED_TIMES", 2)
    for turn in range(400):
        length = 193 + turn % 4 if turn < 200 else 193
        queries, keys, values = random(*[(1, 2, length, 8)] * 3)
        found = operations.attend_all(queries, keys, values, SCALE)
        if turn % 40 == 0:
            right = mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=SCALE
            )
            assert largest(found, right) < 2e-6
    assert len(spelled) == 100 * 256**2 // (2 * 256**2) and set(planned) == {256, 193}
    assert planned == sorted(planned, reverse=True)  # once its own, always its own
    spelled.clear()
    planned.clear()
    monkeypatch.setattr(plans, "current", lambda: Call(is_fixed=True))
    queries, keys, values = random(*[(1, 2, 193, 8)] * 3)
    operations.attend_all(queries, keys, values, SCALE)
    assert planned == [256] and not spelled


# with room for further columns, and with a mask
@pytest.mark.parametrize("width", [16, 128])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_what_fills_a_picture_up_is_not_attended_to(
    width: int, dtype: mx.Dtype
) -> None:
    queries, keys, values = (
        10 * part.astype(dtype) for part in random(*[(2, 3, 70, width)] * 3)
    )
    right = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.1)
    found = plans.attend_filled(queries, keys, values, 128, 0.1)
    assert largest(found.astype(mx.float32), right.astype(mx.float32)) < (
        2e-5 if dtype == mx.float32 else 0.05
    )


def test_few_numbers_lie_an_eighth_of_a_power_of_two_apart() -> None:
    assert [plans.few_from(count, 64) for count in (1, 64, 65, 1024, 1025, 4896, 5121)] == [
        64, 64, 128, 1024, 1152, 5120, 5632
    ]  # fmt: skip
    assert [plans.few_to(count, 16) for count in (0, 15, 16, 81, 300)] == [
        0,
        0,
        16,
        80,
        288,
    ]
    for count in range(1, 3000):
        below, above = plans.few_to(count, 16), plans.few_from(count, 16)
        assert (
            below <= count <= above
            and plans.few_from(below, 16) == below
            and plans.few_to(above, 16) == above
        )


@pytest.mark.parametrize(
    ("heads", "columns", "is_ours"), [(2, 511, False), (2, 512, True), (8, 9, True)]
)
def test_one_query_over_many_keys_or_of_many_heads_is_mlxs(
    heads: int, columns: int, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    ours = powers.attend_step

    def counted(*given: Any) -> mx.array:
        taken.append(1)
        return ours(*given)

    monkeypatch.setattr(powers, "attend_step", counted)
    queries, keys, values = random(
        (3, heads, 1, 16), (3, 2, columns, 16), (3, 2, columns, 24)
    )
    right = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE)
    assert largest(operations.attend(queries, keys, values, SCALE), right) < 2e-6
    is_cpu = mx.default_device().type == mx.DeviceType.cpu
    assert bool(taken) is (is_ours and is_cpu)
    # scores in the hundreds
    far = operations.attend(100 * queries, keys, values, SCALE)
    assert (
        largest(
            far,
            mx.fast.scaled_dot_product_attention(
                100 * queries, keys, values, scale=SCALE
            ),
        )
        < 2e-5
    )


@pytest.mark.parametrize("is_bool", [True, False])
def test_queries_of_a_group_see_the_same_columns(is_bool: bool) -> None:
    queries, keys, values = random((3, 8, 1, 16), (3, 2, 20, 16), (3, 2, 20, 16))
    mask = (mx.arange(20) < mx.array([3, 20, 9])[:, None])[:, None, None]
    mask = mask if is_bool else mx.where(mask, 0.0, -1e30)
    assert masks.is_groupable(queries, keys, mask)
    right = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=SCALE, mask=mask
    )
    assert (
        largest(masks.attend_groups(queries, keys, values, SCALE, mask), right) < 2e-6
    )


def test_a_shape_gets_a_plan_once_it_keeps_coming_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plans, "USES_BEFORE_PLAN", 2)
    monkeypatch.setattr(plans, "_uses", type(plans._uses)())
    queries, keys = random((1, 2, 7, 8), (1, 2, 9, 8))
    assert [plans.is_rare(queries, keys) for _ in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    # too many scores
    assert not plans.is_rare(mx.zeros((1, 64, 2048, 8)), mx.zeros((1, 64, 2048, 8)))


def test_swiglu_is_mlx_vlms_and_holds_far_out() -> None:
    gate, x = random((64, 96), (64, 96))
    gate = mx.concatenate([30 * gate, mx.array([[-200.0, 200.0] * 48])])
    x = mx.concatenate([x, mx.ones((1, 96))])
    assert largest(operations.swiglu(gate, x), swiglu(gate, x)) < 1e-5


class DistinctWindows(VisionModel):  # type: ignore[misc,valid-type]
    """mlx-vlm's tower without windows of length zero, which it keeps: it compares array scalars by identity."""

    def get_window_index(self, grid_thw: mx.array) -> tuple[mx.array, mx.array]:
        index, boundaries = super().get_window_index(grid_thw)
        return index, mx.array(sorted(set(boundaries.tolist())), dtype=mx.int32)


@pytest.mark.parametrize("by_plans", [False, True])
@pytest.mark.parametrize(
    "grids",
    [[[1, 8, 8]], [[1, 6, 10], [1, 4, 4]], [[1, 8, 8]] * 3, [[2, 6, 4]], [[1, 30, 38]]],
)
def test_windows_of_one_size_in_one_call_see_what_mlx_vlms_see(
    grids: list[list[int]], by_plans: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without the plans of few shapes, in which windows and pictures are filled up."""
    monkeypatch.setattr(operations, "counts_launches", lambda: by_plans)
    monkeypatch.setattr(plans, "takes_plans", lambda queries: by_plans)
    monkeypatch.setattr(plans, "current", lambda: Call(is_fixed=by_plans))
    monkeypatch.setattr(plans, "MAX_SCORES", 0)
    tower: Any = family("qwen2_5_vl").build().vision_tower
    config = tower.config
    patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
    pixels = mx.random.normal((sum(t * h * w for t, h, w in grids), patch))
    found = []
    for changed in (WindowRuns, DistinctWindows):
        tower.__class__ = changed
        found.append(tower(pixels, mx.array(grids)))
    assert largest(found[0], found[1]) < 1e-5


def test_windows_of_pictures_of_many_sizes_fill_calls_of_few_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spelled out until the shapes have come often enough, and then in few calls, whose answers are the same."""
    monkeypatch.setattr(operations, "counts_launches", lambda: True)
    monkeypatch.setattr(plans, "takes_plans", lambda queries: True)
    monkeypatch.setattr(plans, "_uses", Counter())
    monkeypatch.setattr(plans, "NUMBERS_BEFORE_PLAN", 2**17)
    attend, fused, shapes = mx.fast.scaled_dot_product_attention, [], set()

    def noted(
        queries: mx.array, *rest: Any, mask: Any = None, **options: Any
    ) -> mx.array:
        fused.append(mask is not None)
        shapes.add((queries.shape, mask is not None))
        return attend(queries, *rest, mask=mask, **options)

    sizes = [(high, wide) for high in range(17, 27) for wide in range(17, 35, 3)]
    for high, wide in sizes:
        order, runs = windows.window_order(high, wide, 4)
        both, values = random((2, len(order), 2, 8), (len(order), 2, 8))
        right = windows.attend_runs(both[0], both[1], values, runs, SCALE)
        monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noted)
        fused.clear()
        found = windows.attend_windows(both, values, runs, 16, SCALE)
        monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attend)
        assert largest(found, right) < 2e-6 and len(fused) <= 3
    assert 0 < len(shapes) <= 6 and {is_masked for _, is_masked in shapes} == {
        False,
        True,
    }


@pytest.mark.parametrize(
    ("whole", "small"),
    [(0, 3), (5, 0), (15, 3), (16, 3), (17, 0), (17, 3), (31, 3), (32, 0), (300, 3)],
)
def test_a_windows_kernel_goes_by_its_size_and_not_by_its_place(
    whole: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every whole window is in a call without a mask, and all others are in the one with a mask."""
    runs = tuple(run for run in ((whole, 4), (small, 2)) if run[0])
    patches = sum(count * size for count, size in runs)
    both, values = random((2, patches, 2, 8), (patches, 2, 8))
    right = windows.attend_runs(both[0], both[1], values, runs, SCALE)
    attend, masked = mx.fast.scaled_dot_product_attention, []

    def noted(
        queries: mx.array, *rest: Any, mask: Any = None, **options: Any
    ) -> mx.array:
        masked.append((len(queries), mask is not None))
        return attend(queries, *rest, mask=mask, **options)

    monkeypatch.setattr(operations, "counts_launches", lambda: True)
    monkeypatch.setattr(plans, "takes_plans", lambda queries: True)
    monkeypatch.setattr(plans, "current", lambda: Call(is_fixed=True))
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noted)
    made = cuda_windows.windows_of(runs, 4)
    assert largest(windows.attend_windows(both, values, runs, 4, SCALE), right) < 2e-6
    assert [count for count, is_masked in masked if is_masked] == (
        [16] if small else []
    )
    assert all(count % 16 == 0 or count == whole < 16 for count, _ in masked)
    assert [shape[0] for shape in made.calls(2, 8)] == [count for count, _ in masked]


def test_what_is_made_of_a_mask_goes_with_it() -> None:
    before = set(masks._made)
    mask = mx.array([[True, False]])
    made = masks.added(mask, mx.float32)
    assert masks.added(mask, mx.float32) is made
    other = mx.array([[False, True]])
    kept = masks.added(other, mx.float16)
    del mask  # another has come since
    assert masks.added(other, mx.float16) is kept
    assert len(set(masks._made) - before) == 1
    del other
    assert set(masks._made) <= before
