"""Qwen2.5-VL's tower with few attention calls a block; mlx-vlm makes one per window."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.qwen2_5_vl.language import Attention
from mlx_vlm.models.qwen2_5_vl.vision import PatchEmbed, VisionModel

from vlm_batch.adapters import operations
from vlm_batch.adapters.attention import seal_masks
from vlm_batch.adapters.towers import embed_by_product
from vlm_batch.adapters.windows import (
    RotationFactors,
    Run,
    attend_runs,
    attend_windows,
    merge_runs,
    patch_positions,
    rotate,
    window_order,
)


@dataclass(frozen=True)
class Layout:
    order: mx.array  # (N / unit,) merged positions
    back: mx.array  # (N / unit,)
    turn: RotationFactors
    windows: tuple[Run, ...]
    size: int  # patches of a whole window
    pictures: tuple[Run, ...]
    # (N,) patches, and back again; None for one picture
    by_picture: tuple[mx.array, mx.array] | None


@dataclass(frozen=True)
class TowerSizes:
    merge: int  # patches per side of a merged position
    window: int  # merged positions per side of a window
    theta: float
    width: int  # of a rotation by rows or columns: half a head


#: Most patches of a layout that is kept, at 640 bytes each with heads of 80.
MOST_KEPT = 16_384


def layout_of(grids: tuple[tuple[int, int, int], ...], tower: TowerSizes) -> Layout:
    """Return the evaluated layout of grids (frames, rows, columns), cached if small."""
    is_small = sum(frames * high * wide for frames, high, wide in grids) <= MOST_KEPT
    return (_kept_layout if is_small else _new_layout)(grids, tower)


def _new_layout(grids: tuple[tuple[int, int, int], ...], tower: TowerSizes) -> Layout:
    merge, unit = tower.merge, tower.merge**2
    orders: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    sizes: list[np.ndarray] = []  # size of each position's window
    wholes: list[Run] = []
    start = 0
    for frames, high, wide in grids:
        order, runs = window_order(high // merge, wide // merge, tower.window)
        for _ in range(frames):
            orders.append(order + start)
            sizes.extend(np.full(count * size, size) for count, size in runs)
            wholes.append((1, high * wide))
            positions.append(
                patch_positions(high, wide, merge).reshape(-1, unit, 2)[order]
            )
            start += len(order)
    # groups windows of one size of all pictures
    by_size = np.argsort(-np.concatenate(sizes), kind="stable")
    order = np.concatenate(orders)[by_size]
    counts = Counter(np.concatenate(sizes).tolist())
    in_windows = tuple(
        (counts[size] // size, size * unit) for size in sorted(counts, reverse=True)
    )
    by_picture = None
    if len(wholes) > 1:
        by_picture = _patches_of(np.argsort(by_size), unit), _patches_of(by_size, unit)
    return Layout(
        mx.array(order),
        mx.array(np.argsort(order)),
        _rotation(np.concatenate(positions)[by_size].reshape(-1, 2), tower),
        in_windows,
        tower.window**2 * unit,
        merge_runs(wholes),
        by_picture,
    )


_kept_layout = lru_cache(maxsize=8)(_new_layout)


def _rotation(positions: np.ndarray, tower: TowerSizes) -> RotationFactors:
    """Return the rotation of patches at (row, column), (N, 2)."""
    speeds = 1.0 / (
        tower.theta ** (np.arange(0, tower.width, 2, dtype=np.float32) / tower.width)
    )
    angles = (
        (np.arange(positions.max() + 1)[:, None] * speeds.astype(np.float32))
        .astype(np.float32)
        .astype(np.float64)
    )
    cos, sin = (
        turned.astype(np.float32)[positions].reshape(len(positions), 1, -1)
        for turned in (np.cos(angles), np.sin(angles))
    )
    return mx.array(np.stack([cos, sin], axis=2)), mx.array(
        np.stack([-sin, cos], axis=2)
    )


class WindowRuns(VisionModel):
    def __call__(
        self,
        hidden_states: mx.array,
        grid_thw: mx.array,
        output_hidden_states: Any = None,
    ) -> mx.array:
        """Patches (N, values) of grids (P, 3) -> features (N / merge², D)."""
        merge, rotary = self.spatial_merge_size, self.rotary_pos_emb
        tower = TowerSizes(
            merge,
            self.window_size // merge // self.patch_size,
            rotary.theta,
            rotary.dim,
        )
        layout = layout_of(tuple(map(tuple, np.array(grid_thw).tolist())), tower)
        x = self.patch_embed(hidden_states)
        patches = x.shape[0]
        # (N, D)
        x = x.reshape(-1, self.spatial_merge_unit, x.shape[-1])[layout.order].reshape(
            patches, -1
        )
        for number, block in enumerate(self.blocks):
            is_whole = number in self.fullatt_block_indexes
            x = x + self._attend(block.attn, block.norm1(x), layout, is_whole)
            x = x + self._gated(block.mlp, block.norm2(x))
        return self.merger(x)[layout.back]

    @staticmethod
    def _gated(module: Any, x: mx.array) -> mx.array:
        return module.down_proj(
            operations.swiglu(module.gate_proj(x), module.up_proj(x))
        )

    @staticmethod
    def _attend(module: Any, x: mx.array, layout: Layout, is_whole: bool) -> mx.array:
        split = module.qkv(x).reshape(x.shape[0], 3, module.num_heads, -1)
        both, values = rotate(split[:, :2].swapaxes(0, 1), layout.turn), split[:, 2]
        if not is_whole:
            return module.proj(
                attend_windows(both, values, layout.windows, layout.size, module.scale)
            )
        if layout.by_picture is None:
            return module.proj(
                attend_runs(both[0], both[1], values, layout.pictures, module.scale)
            )
        there, back = layout.by_picture
        attended = attend_runs(
            both[0][there], both[1][there], values[there], layout.pictures, module.scale
        )
        return module.proj(attended[back])


def _patches_of(positions: np.ndarray, unit: int) -> mx.array:
    return mx.array((positions[:, None] * unit + np.arange(unit)).reshape(-1))


PATCHES: dict[type, type] = {
    VisionModel: WindowRuns,
    Attention: seal_masks(Attention),
    PatchEmbed: embed_by_product(PatchEmbed),
}
