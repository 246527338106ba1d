"""Qwen2.5-VL's vision tower with its windows of one size in one attention call, and one rotation a picture.

mlx-vlm's calls attention once a window (25 windows of a picture of 504 pixels in each of 28 blocks), turns the boundaries into
a list in every block, which waits for the device, and takes cosines and sines anew for queries and keys of every block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters import kernels

Run = tuple[int, int]  # how many windows follow each other, and the patches of each


@lru_cache(maxsize=256)
def window_order(high: int, wide: int, window: int) -> tuple[np.ndarray, tuple[Run, ...]]:
    """The order of a picture's merged positions (high * wide,), window by window, and the runs of windows of one size.

    Windows are ``window`` positions a side, smaller at the right and lower edges; the largest come first, which is another
    order than mlx-vlm's: nothing but rounding depends on it, since each block sees a window's patches as a set.
    """
    rows, columns = np.divmod(np.arange(high * wide), wide)
    which = rows // window * -(-wide // window) + columns // window
    sizes = np.bincount(which)
    order = np.lexsort((which, -sizes[which]))
    lengths = -np.sort(-sizes)
    return order, tuple((len(list(group)), int(size)) for size, group in groupby(lengths.tolist()))


def patch_positions(high: int, wide: int, merge: int) -> np.ndarray:
    """The (row, column) of each patch (high * wide, 2) in the processor's order: ``merge`` x ``merge`` blocks."""
    grid = np.stack(np.meshgrid(np.arange(high), np.arange(wide), indexing="ij"), axis=-1)
    blocks = grid.reshape(high // merge, merge, wide // merge, merge, 2)
    return blocks.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotary embedding in float32 of (2, N, H, D) by (N, 1, D), in the halves' order."""
    first, second = mx.split(x, 2, axis=-1)
    return (x * cos + mx.concatenate([-second, first], axis=-1) * sin).astype(x.dtype)


def attend_runs(queries: mx.array, keys: mx.array, values: mx.array, runs: Sequence[Run], scale: float) -> mx.array:
    """Attention of patches (N, H, D) within their window, one call for each run of windows of one size: (N, H * D)."""
    outputs, start = [], 0
    for count, length in runs:
        stop = start + count * length
        parts = [
            part[start:stop].reshape(count, length, *part.shape[1:]).swapaxes(1, 2) for part in (queries, keys, values)
        ]
        attended = kernels.attend(parts[0], parts[1], parts[2], scale)  # (count, H, length, D)
        outputs.append(attended.swapaxes(1, 2).reshape(count * length, -1))
        start = stop
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def merge_runs(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Neighbouring runs of one size as one."""
    return tuple((sum(count for count, _ in group), size) for size, group in _by_size(runs))


def _by_size(runs: Sequence[Run]) -> list[tuple[int, list[Run]]]:
    return [(size, list(group)) for size, group in groupby(runs, key=lambda run: run[1])]


def window_runs(tower_class: type[nn.Module]) -> type[nn.Module]:
    """Qwen2.5-VL's vision tower: the same function of pixels, with one attention call for windows of one size."""

    class WindowRuns(tower_class):  # type: ignore[misc,valid-type]
        def __call__(self, hidden_states: mx.array, grid_thw: mx.array, output_hidden_states: Any = None) -> mx.array:
            """Patches (N, values) of pictures with grids (P, 3) -> features (N / merge², D), picture by picture."""
            merge, unit = self.spatial_merge_size, self.spatial_merge_unit
            side = self.window_size // merge // self.patch_size
            orders: list[np.ndarray] = []
            places: list[np.ndarray] = []
            windows: list[Run] = []
            wholes: list[Run] = []
            start = 0
            for frames, high, wide in np.array(grid_thw).tolist():
                order, runs = window_order(high // merge, wide // merge, side)
                for _ in range(frames):
                    orders.append(order + start)
                    windows.extend(runs)
                    wholes.append((1, high * wide))
                    places.append(patch_positions(high, wide, merge).reshape(-1, unit, 2)[order])
                    start += len(order)
            order = np.concatenate(orders)
            in_windows = merge_runs([(count, size * unit) for count, size in windows])
            in_pictures = merge_runs(wholes)
            cos, sin = self._rotation(np.concatenate(places).reshape(-1, 2))
            x = self.patch_embed(hidden_states)
            x = x.reshape(start, unit, -1)[mx.array(order)].reshape(start * unit, -1)  # (N, D)
            for number, block in enumerate(self.blocks):
                runs = in_pictures if number in self.fullatt_block_indexes else in_windows
                x = x + self._attend(block.attn, block.norm1(x), runs, cos, sin)
                x = x + self._gated(block.mlp, block.norm2(x))
            return self.merger(x)[mx.array(np.argsort(order))]

        def _rotation(self, places: np.ndarray) -> tuple[mx.array, mx.array]:
            """Cosines and sines (N, 1, D) for patches at (row, column) (N, 2): rows turn one half, columns the other."""
            rotary = self.rotary_pos_emb
            speeds = 1.0 / (rotary.theta ** (np.arange(0, rotary.dim, 2, dtype=np.float32) / rotary.dim))
            angles = (places[:, :, None] * speeds.astype(np.float32)).reshape(len(places), 1, -1).astype(np.float32)
            turned = mx.array(np.concatenate([angles, angles], axis=-1))
            return mx.cos(turned), mx.sin(turned)

        @staticmethod
        def _gated(module: Any, x: mx.array) -> mx.array:
            """(N, D) -> (N, D)"""
            return module.down_proj(kernels.swiglu(module.gate_proj(x), module.up_proj(x)))

        @staticmethod
        def _attend(module: Any, x: mx.array, runs: Sequence[Run], cos: mx.array, sin: mx.array) -> mx.array:
            """(N, D) -> (N, D)"""
            split = module.qkv(x).reshape(x.shape[0], 3, module.num_heads, -1)
            queries, keys = rotate(split[:, :2].swapaxes(0, 1), cos, sin)
            return module.proj(attend_runs(queries, keys, split[:, 2], runs, module.scale))

    return WindowRuns


def distinct_windows(tower_class: type[nn.Module]) -> type[nn.Module]:
    """Qwen2.5-VL's vision tower without windows of length zero."""

    class DistinctWindows(tower_class):  # type: ignore[misc,valid-type]
        def get_window_index(self, grid_thw: mx.array) -> tuple[mx.array, mx.array]:
            """A padded grid has windows without patches, whose boundaries repeat (upstream: vision.py, __call__)."""
            index, boundaries = super().get_window_index(grid_thw)
            return index, mx.array(sorted(set(boundaries.tolist())), dtype=mx.int32)

    return DistinctWindows
