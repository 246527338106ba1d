"""Qwen2.5-VL's vision tower with its windows of one size in one attention call, and one rotation a picture.

mlx-vlm's calls attention once a window (25 windows of a picture of 504 pixels in each of 28 blocks), turns the boundaries into
a list in every block, which waits for the device, and takes cosines and sines anew for queries and keys of every block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.qwen2_5_vl.language import Attention
from mlx_vlm.models.qwen2_5_vl.vision import VisionModel

from vlm_batch.adapters import kernels
from vlm_batch.adapters.attention import seal_masks
from vlm_batch.adapters.windows import (
    Run,
    Turn,
    attend_runs,
    merge_runs,
    patch_positions,
    rotate,
    turn_by,
    window_order,
)


class WindowRuns(VisionModel):
    """The same function of pixels, with one attention call for windows of one size, and one rotation a picture."""

    def __call__(self, hidden_states: mx.array, grid_thw: mx.array, output_hidden_states: Any = None) -> mx.array:
        """Patches (N, values) of pictures with grids (P, 3) -> features (N / merge², D), picture by picture."""
        merge, unit = self.spatial_merge_size, self.spatial_merge_unit
        side = self.window_size // merge // self.patch_size
        orders: list[np.ndarray] = []
        places: list[np.ndarray] = []
        sizes: list[np.ndarray] = []  # of the window that each position is in
        wholes: list[Run] = []
        start = 0
        for frames, high, wide in np.array(grid_thw).tolist():
            order, runs = window_order(high // merge, wide // merge, side)
            for _ in range(frames):
                orders.append(order + start)
                sizes.extend(np.full(count * size, size) for count, size in runs)
                wholes.append((1, high * wide))
                places.append(patch_positions(high, wide, merge).reshape(-1, unit, 2)[order])
                start += len(order)
        by_size = np.argsort(-np.concatenate(sizes), kind="stable")  # windows of one size of all pictures together
        order = np.concatenate(orders)[by_size]
        counts = Counter(np.concatenate(sizes).tolist())
        in_windows = tuple((counts[size] // size, size * unit) for size in sorted(counts, reverse=True))
        in_pictures = merge_runs(wholes)
        by_picture = None
        if len(wholes) > 1:
            by_picture = _patches_of(np.argsort(by_size), unit), _patches_of(by_size, unit)
        turn = self._rotation(np.concatenate(places)[by_size].reshape(-1, 2))
        x = self.patch_embed(hidden_states)
        x = x.reshape(start, unit, -1)[mx.array(order)].reshape(start * unit, -1)  # (N, D)
        for number, block in enumerate(self.blocks):
            is_whole = number in self.fullatt_block_indexes
            runs, gathered = (in_pictures, by_picture) if is_whole else (in_windows, None)
            x = x + self._attend(block.attn, block.norm1(x), runs, turn, gathered)
            x = x + self._gated(block.mlp, block.norm2(x))
        return self.merger(x)[mx.array(np.argsort(order))]

    def _rotation(self, places: np.ndarray) -> Turn:
        """The rotation of patches at (row, column) (N, 2): rows turn one half, columns the other."""
        rotary = self.rotary_pos_emb
        speeds = 1.0 / (rotary.theta ** (np.arange(0, rotary.dim, 2, dtype=np.float32) / rotary.dim))
        angles = (places[:, :, None] * speeds.astype(np.float32)).reshape(len(places), -1)
        return turn_by(mx.array(angles.astype(np.float32)))

    @staticmethod
    def _gated(module: Any, x: mx.array) -> mx.array:
        """(N, D) -> (N, D)"""
        return module.down_proj(kernels.swiglu(module.gate_proj(x), module.up_proj(x)))

    @staticmethod
    def _attend(
        module: Any,
        x: mx.array,
        runs: Sequence[Run],
        turn: Turn,
        gathered: tuple[mx.array, mx.array] | None,
    ) -> mx.array:
        """(N, D) -> (N, D). ``gathered`` are the patches' places (N,) picture by picture, if the runs are pictures, and the
        places of these in the order of the windows."""
        split = module.qkv(x).reshape(x.shape[0], 3, module.num_heads, -1)
        queries, keys = rotate(split[:, :2].swapaxes(0, 1), turn)
        values = split[:, 2]
        if gathered is None:
            return module.proj(attend_runs(queries, keys, values, runs, module.scale))
        there, back = gathered
        attended = attend_runs(queries[there], keys[there], values[there], runs, module.scale)
        return module.proj(attended[back])


def _patches_of(places: np.ndarray, unit: int) -> mx.array:
    """The places of the patches of merged positions, ``unit`` each."""
    return mx.array((places[:, None] * unit + np.arange(unit)).reshape(-1))


PATCHES: dict[type, type] = {VisionModel: WindowRuns, Attention: seal_masks(Attention)}
