"""Patches of adapters, one at a time, where the parity matrix does not reach: each against its definition."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.cache import KVCache
from mlx_vlm.models.deepseek_vl_v2.config import TextConfig
from mlx_vlm.models.deepseek_vl_v2.language import MoEGate
from mlx_vlm.models.rope_utils import SuScaledRoPE

from vlm_batch.adapters.attention import each_row
from vlm_batch.adapters.longrope import ROW_ROPES
from vlm_batch.adapters.modules import clone_modules
from vlm_batch.adapters.routing import dropped_groups
from vlm_batch.adapters.vision import resize_bicubic
from vlm_batch.caches import BlockCache, BlockSlabCache, RowsCache
from vlm_batch.caches.retained import RetainedPromptCache
from vlm_batch.models.deepseek_vl_v2 import DeepseekVL2

BLOCK = 4


def keys_of(start: int, end: int) -> mx.array:
    """Keys (1, 1, L, 2) that say their own positions."""
    return mx.broadcast_to(
        mx.arange(start, end, dtype=mx.float32)[None, None, :, None],
        (1, 1, end - start, 2),
    )


@pytest.mark.parametrize("chunks", [[11], [4, 4, 3], [1] * 11, [3, 5, 3], [8, 1, 2]])
def test_a_block_cache_shows_each_token_its_own_block(chunks: list[int]) -> None:
    cache, done = BlockCache(BLOCK), 0
    for length in chunks:
        mask = cache.make_mask(length)
        keys, _ = cache.update_and_fetch(
            keys_of(done, done + length), keys_of(done, done + length)
        )
        positions = np.array(keys[0, 0, :, 0])
        for row in range(length):
            seen = positions if mask is None else positions[np.array(mask[row])]
            position = done + row
            assert seen.tolist() == list(range(position // BLOCK * BLOCK, position + 1))
        done += length
    assert cache.offset == done


@pytest.mark.parametrize("lengths", [(3, 9), (4, 8), (1, 6)])
def test_block_slabs_show_each_row_its_own_block(lengths: tuple[int, int]) -> None:
    """Two rows with a hole between them, decoded over two block ends."""
    slab = BlockSlabCache(3, BLOCK)
    slab.resize(3)
    for place, length in zip((0, 2), lengths, strict=True):
        single = BlockCache(BLOCK)
        single.make_mask(length)
        single.update_and_fetch(keys_of(0, length), keys_of(0, length))
        slab.put(place, single)
    for step in range(6):
        mask = slab.make_mask(1)
        assert mask is not None
        offsets = [lengths[0] + step, 0, lengths[1] + step]
        new = mx.concatenate([keys_of(offset, offset + 1) for offset in offsets])
        keys, _ = slab.update_and_fetch(new, new)
        for place in (0, 2):
            seen = np.array(keys[place, 0, :, 0])[np.array(mask[place, 0, 0])]
            assert sorted(seen.tolist()) == list(
                range(offsets[place] // BLOCK * BLOCK, offsets[place] + 1)
            )


def test_a_retained_prompt_stays_and_the_answer_rolls() -> None:
    cache, prompt, window = RetainedPromptCache(3), 5, 3
    # a last chunk of one token is still the prompt's
    for start, end in ((0, 4), (4, 5)):
        cache.update_and_fetch(keys_of(start, end), keys_of(start, end))
    cache.end_prompt()
    for position in range(prompt, prompt + 8):
        keys, _ = cache.update_and_fetch(
            keys_of(position, position + 1), keys_of(position, position + 1)
        )
        assert keys is not None
        answer = range(max(prompt, position - window + 1), position + 1)
        assert sorted(np.array(keys[0, 0, :, 0]).tolist()) == [*range(prompt), *answer]
        assert cache.offset == position + 1
    assert isinstance(cache, KVCache)


def gate(**settings: Any) -> tuple[Any, Any]:
    """mlx-vlm's gate with random weights, and the adapter's."""
    config = TextConfig(
        hidden_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        scoring_func="sigmoid",
        **settings,
    )
    upstream = MoEGate(config)
    random = np.random.RandomState(3)
    upstream.weight = mx.array(random.standard_normal((8, 16)).astype(np.float32))
    if "e_score_correction_bias" in upstream:
        upstream.e_score_correction_bias = mx.array(
            random.standard_normal(8).astype(np.float32)
        )
    return upstream, clone_modules(upstream, DeepseekVL2.patches())


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_experts_are_chosen_by_score_and_bias(groups: tuple[int, int]) -> None:
    """DeepSeek's MoEGate (noaux_tc) by the book, token by token."""
    _, patched = gate(
        topk_method="noaux_tc",
        n_group=groups[0],
        topk_group=groups[1],
        routed_scaling_factor=2.5,
    )
    tokens = mx.array(
        np.random.RandomState(4).standard_normal((3, 5, 16)).astype(np.float32)
    )
    experts, weights = (np.array(part) for part in patched(tokens))
    scores = 1 / (1 + np.exp(-np.array(tokens @ patched.weight.T)))
    choice = scores + np.array(patched.e_score_correction_bias)
    for row, token in np.ndindex(3, 5):
        chosen = choice[row, token].reshape(groups[0], -1)
        kept = np.argsort(np.sort(chosen, axis=-1)[:, -2:].sum(axis=-1))[-groups[1] :]
        allowed = np.where(
            np.isin(np.arange(groups[0]), kept)[:, None], chosen, 0
        ).reshape(-1)
        best = set(np.argsort(allowed)[-2:].tolist())
        assert set(experts[row, token].tolist()) == best
        np.testing.assert_allclose(
            weights[row, token],
            2.5 * scores[row, token][experts[row, token]],
            rtol=1e-5,
        )


@pytest.mark.parametrize("package", ["deepseek_v3", "glm4v_moe", "kimi_vl", "youtu_vl"])
@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (4, 2), (4, 4)])
def test_dropped_groups_have_no_expert(package: str, groups: tuple[int, int]) -> None:
    """DeepSeek-V3's router by the book, token by token, with scores and biases that come to less than zero."""
    kind = import_module(f"mlx_vlm.models.{package}.language").MoEGate
    settings: dict[str, Any] = {
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "n_routed_experts": 8,
        "routed_scaling_factor": 2.5,
    }
    settings |= {
        "n_group": groups[0],
        "topk_group": groups[1],
        "hidden_size": 16,
        "topk_method": "noaux_tc",
    }
    upstream = kind(SimpleNamespace(**settings))
    random = np.random.RandomState(3)
    upstream.weight = mx.array(random.standard_normal((8, 16)).astype(np.float32))
    upstream.e_score_correction_bias = mx.array(
        random.standard_normal(8).astype(np.float32) - 0.8
    )
    tokens = mx.array(
        np.random.RandomState(4).standard_normal((3, 5, 16)).astype(np.float32)
    )
    experts, weights = (
        np.array(part)
        for part in clone_modules(upstream, {kind: dropped_groups(kind)})(tokens)
    )  # type: ignore[operator]
    scores = 1 / (1 + np.exp(-np.array(tokens @ upstream.weight.T)))
    choice = scores + np.array(upstream.e_score_correction_bias)
    for row, token in np.ndindex(3, 5):
        grouped = choice[row, token].reshape(groups[0], -1)
        kept = np.argsort(np.sort(grouped, axis=-1)[:, -2:].sum(axis=-1))[-groups[1] :]
        allowed = np.where(
            np.isin(np.arange(groups[0]), kept)[:, None], grouped, -np.inf
        ).reshape(-1)
        assert set(experts[row, token].tolist()) == set(
            np.argsort(allowed)[-2:].tolist()
        )
        chosen = scores[row, token][experts[row, token]]
        np.testing.assert_allclose(
            weights[row, token], 2.5 * chosen / chosen.sum(), rtol=1e-5
        )


def test_greedy_experts_are_mlx_vlms() -> None:
    upstream, patched = gate(topk_method="greedy")
    tokens = mx.array(
        np.random.RandomState(5).standard_normal((2, 4, 16)).astype(np.float32)
    )
    for found, right in zip(patched(tokens), upstream(tokens), strict=True):
        np.testing.assert_array_equal(found, right)


def test_long_rope_is_each_rows_own_choice() -> None:
    rope = SuScaledRoPE(
        8,
        100.0,
        64,
        8,
        short_factor=[1.0, 1.1, 1.2, 1.3],
        long_factor=[2.0, 3.0, 4.0, 5.0],
    )
    patched: Any = clone_modules(rope, ROW_ROPES)
    x = mx.array(
        np.random.RandomState(6).standard_normal((3, 2, 1, 8)).astype(np.float32)
    )
    together = patched(x, offset=mx.array([2, 7, 30]))
    for row, offset in enumerate((2, 7, 30)):
        np.testing.assert_allclose(
            together[row : row + 1], rope(x[row : row + 1], offset=offset), atol=1e-5
        )
    long = rope(mx.concatenate([x[:1]] * 20, axis=2))  # a prompt of 20 in one run
    patched.prompt = 20
    np.testing.assert_allclose(patched(x[:1], offset=0), long[:, :, :1], atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [((4, 4), (4, 4)), ((3, 5), (7, 2)), ((8, 8), (5, 13)), ((1, 2), (3, 3))],
)
def test_tables_are_resized_by_keys_kernel_with_edges_repeated(
    old: tuple[int, int], new: tuple[int, int]
) -> None:
    """``F.interpolate(mode="bicubic", align_corners=False)`` by the book, in float64."""
    table = np.random.RandomState(7).standard_normal((*old, 3))

    def kernel(x: float) -> float:
        x = abs(x)
        if x <= 1:
            return 1.25 * x**3 - 2.25 * x**2 + 1
        return -0.75 * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0

    right = np.zeros((*new, 3))
    for row, column in np.ndindex(new):
        y, x = (
            (place + 0.5) * old[axis] / new[axis] - 0.5
            for axis, place in enumerate((row, column))
        )
        for i in range(int(np.floor(y)) - 1, int(np.floor(y)) + 3):
            for j in range(int(np.floor(x)) - 1, int(np.floor(x)) + 3):
                inside = table[min(max(i, 0), old[0] - 1), min(max(j, 0), old[1] - 1)]
                right[row, column] += kernel(y - i) * kernel(x - j) * inside
    np.testing.assert_allclose(
        resize_bicubic(mx.array(table.astype(np.float32)), new), right, atol=1e-5
    )


def test_a_function_over_rows_sees_each_row_and_leaves_empty_places_zero() -> None:
    rows = RowsCache()
    rows.resize(3)
    for place, length in ((0, 2), (2, 5)):
        single = KVCache()
        single.update_and_fetch(keys_of(0, length), keys_of(0, length))
        rows.put(place, single)
    x = mx.arange(1, 4, dtype=mx.float32)[:, None]

    def of_one(cache: Any, part: mx.array, factor: float) -> tuple[mx.array, mx.array]:
        return part * factor, mx.array([[cache.offset]])

    scaled, lengths = each_row(of_one, rows, rows, x, factor=10.0)
    assert scaled.tolist() == [[10.0], [0.0], [30.0]]
    assert lengths.tolist() == [[2], [0], [5]]
    assert each_row(lambda part: part, rows, x).tolist() == [[1.0], [0.0], [3.0]]
