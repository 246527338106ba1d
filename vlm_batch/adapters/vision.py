"""Resizing, pooling and tile layout of features."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np


def best_grid(
    size: Sequence[int], tile: int, grids: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Return the tiles' grid (rows, columns) for a size (height, width)."""
    from transformers.image_processing_utils import select_best_resolution

    best = select_best_resolution(
        (size[0], size[1]), [(tile * rows, tile * columns) for rows, columns in grids]
    )
    return best[0] // tile, best[1] // tile


def pack_tiles(
    features: mx.array, size: Sequence[int], grid: tuple[int, int], newline: mx.array
) -> mx.array:
    """Lay out a picture and its tiles as one plane without padding, a newline after each row.

    (1 + rows * columns, side * side, D) -> (tokens, D), as in transformers (modeling_llava_next.py, unpad_image).
    """
    (high, wide), side = size, int(features.shape[1] ** 0.5)
    plane = (
        features[1:]
        .reshape(*grid, side, side, -1)
        .swapaxes(1, 2)
        .reshape(grid[0] * side, grid[1] * side, -1)
    )
    rows, columns, width = plane.shape
    if wide / high > columns / rows:
        padding = (rows - int(round(high * (columns / wide), 7))) // 2
        plane = plane[padding : rows - padding]
    else:
        padding = (columns - int(round(wide * (rows / high), 7))) // 2
        plane = plane[:, padding : columns - padding]
    ends = mx.broadcast_to(newline.astype(plane.dtype), (len(plane), 1, width))
    return mx.concatenate(
        [features[0], mx.concatenate([plane, ends], axis=1).reshape(-1, width)]
    )


def resize_bicubic(table: mx.array, size: tuple[int, int]) -> mx.array:
    """Resize a table (H, W, D) to (h, w, D), as torch's ``F.interpolate`` without aligned corners.

    Edges repeat. Without Metal, mlx-vlm drops taps beyond them (mlx_vlm/models/kernels.py:165).
    """
    rows, columns = (
        cubic_weights(
            mx.array((np.arange(new) + 0.5) * old / new - 0.5, mx.float32), old
        )
        for new, old in zip(size, table.shape[:2], strict=True)
    )
    return mx.einsum("hH,wW,HWd->hwd", rows, columns, table.astype(mx.float32)).astype(
        table.dtype
    )


def resize_linear(table: mx.array, length: int) -> mx.array:
    """Resize a table (L, D), as torch's linear ``F.interpolate`` without aligned corners."""
    points = mx.clip(
        (mx.arange(length) + 0.5) * (len(table) / length) - 0.5, 0, len(table) - 1
    )
    before = mx.floor(points).astype(mx.int32)
    share = (points - before)[:, None]
    return (
        table[before] * (1 - share)
        + table[mx.minimum(before + 1, len(table) - 1)] * share
    ).astype(table.dtype)


def cubic_weights(points: mx.array, side: int) -> mx.array:
    """Return weights (N, side) for points (N,), by Keys' kernel (1981) with a = -0.75, borders repeated."""
    taps = mx.floor(points)[:, None] + mx.arange(-1, 3)  # (N, 4)
    distance = mx.abs(points[:, None] - taps)
    near = (1.25 * distance - 2.25) * distance**2 + 1
    far = -0.75 * (((distance - 5) * distance + 8) * distance - 4)
    hits = mx.clip(taps, 0, side - 1)[..., None] == mx.arange(side)  # (N, 4, side)
    return (mx.where(distance <= 1, near, far)[..., None] * hits).sum(axis=1)


def adaptive_average(grid: mx.array, size: int) -> mx.array:
    """Average (H, W, D) to (size, size, D), as torch's ``adaptive_avg_pool2d``."""
    rows, columns = _windows(grid.shape[0], size), _windows(grid.shape[1], size)
    return mx.einsum("ih,hwd,jw->ijd", rows, grid.astype(mx.float32), columns).astype(
        grid.dtype
    )


def _windows(length: int, size: int) -> mx.array:
    columns = mx.arange(length)[None]
    starts = (mx.arange(size) * length // size)[:, None]
    ends = ((mx.arange(1, size + 1) * length + size - 1) // size)[:, None]
    inside = (columns >= starts) & (columns < ends)
    return inside / inside.sum(axis=1, keepdims=True)
