"""Attention of a vision tower's patches within windows: their order, and one call for windows of one size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

import mlx.core as mx
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
        attended = kernels.attend_all(parts[0], parts[1], parts[2], scale)  # (count, H, length, D)
        outputs.append(attended.swapaxes(1, 2).reshape(count * length, -1))
        start = stop
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def merge_runs(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Neighbouring runs of one size as one."""
    return tuple((sum(count for count, _ in group), size) for size, group in _by_size(runs))


def _by_size(runs: Sequence[Run]) -> list[tuple[int, list[Run]]]:
    return [(size, list(group)) for size, group in groupby(runs, key=lambda run: run[1])]
