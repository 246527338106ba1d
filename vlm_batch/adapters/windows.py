"""Attention within windows or pictures.

mlx-vlm calls attention per window, and each block reads boundaries from the device or masks pictures apart. Here
boundaries and rotation are made once, and equal consecutive windows share a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters import operations
from vlm_batch.adapters.masks import once
from vlm_batch.adapters.runs import Run, in_runs

#: Factors of each pair's first and second number: (N, 1, 2, D / 2), or (N, 1, D / 2, 2) for neighbours.
RotationFactors = tuple[mx.array, mx.array]


@lru_cache(maxsize=256)
def window_order(
    high: int, wide: int, window: int
) -> tuple[np.ndarray, tuple[Run, ...]]:
    """Return the order (high * wide,) of merged positions by window, and runs of equal windows.

    The largest come first, unlike mlx-vlm's: only rounding changes. Edge windows are smaller.
    """
    rows, columns = np.divmod(np.arange(high * wide), wide)
    which = rows // window * -(-wide // window) + columns // window
    sizes = np.bincount(which)
    order = np.lexsort((which, -sizes[which]))
    lengths = -np.sort(-sizes)
    return order, tuple(
        (len(list(group)), int(size)) for size, group in groupby(lengths.tolist())
    )


def patch_positions(high: int, wide: int, merge: int) -> np.ndarray:
    """Return each patch's (row, column) in blocks of ``merge`` x ``merge``: (high * wide, 2)."""
    grid = np.stack(
        np.meshgrid(np.arange(high), np.arange(wide), indexing="ij"), axis=-1
    )
    blocks = grid.reshape(high // merge, merge, wide // merge, merge, 2)
    return blocks.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def rotate(x: mx.array, turn: RotationFactors, axis: int = -2) -> mx.array:
    """Rotate (2, N, H, D) in float32; pairs are half a head apart (axis -2) or neighbours (axis -1)."""
    pairs = x.reshape(*x.shape[:-1], *((2, -1) if axis == -2 else (-1, 2)))
    first, second = (
        (pairs[..., :1, :], pairs[..., 1:, :])
        if axis == -2
        else (pairs[..., :1], pairs[..., 1:])
    )
    return operations.turn_pairs(first, second, *turn).reshape(x.shape)


def attend_runs(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    runs: Sequence[Run],
    scale: float,
) -> mx.array:
    """Attend within windows of patches (N, H, D), one call a run: (N, H * D)."""
    return in_runs(operations.attend_all, queries, keys, values, runs, scale)


def attend_windows(
    both: mx.array, values: mx.array, runs: tuple[Run, ...], size: int, scale: float
) -> mx.array:
    """Attend within windows of up to ``size`` patches: queries and keys (2, N, H, D), values (N, H, D) -> (N, H * D)."""
    found = operations.attend_windows(both, values, runs, size, scale)
    if found is not None:
        return found
    return attend_runs(both[0], both[1], values, runs, scale)


def merge_runs(runs: Sequence[Run]) -> tuple[Run, ...]:
    return tuple(
        (sum(count for count, _ in group), size)
        for size, group in groupby(runs, key=lambda run: run[1])
    )


def _attend_turned(
    split: mx.array,
    turn: RotationFactors,
    boundaries: mx.array,
    scale: float,
    axis: int = -2,
) -> mx.array:
    """Rotate queries and keys, and attend within pictures: queries, keys and values (N, 3, H, D) -> (N, H * D)."""
    queries, keys = rotate(split[:, :2].swapaxes(0, 1), turn, axis)
    runs = once(boundaries, runs_between)
    return attend_runs(queries, keys, split[:, 2], runs, scale)


def attend_pictures(
    parent: type[nn.Module], project: str = "qkv", output: str = "proj"
) -> type[nn.Module]:
    """Subclass an attention of patches (N, D) with angles (N, D / 2) to use ``attend_runs``.

    Without ``cu_seqlens``, pictures (P, L, D) of one size run mlx-vlm's attention.
    """

    class PictureAttention(parent):  # type: ignore[misc,valid-type]
        def __call__(
            self, x: mx.array, cu_seqlens: mx.array | None, rotary_pos_emb: mx.array
        ) -> mx.array:
            if cu_seqlens is None:
                return super().__call__(x, cu_seqlens, rotary_pos_emb)
            split = self[project](x).reshape(x.shape[0], 3, self.num_heads, -1)
            turn = once(rotary_pos_emb, turn_by)
            return self[output](_attend_turned(split, turn, cu_seqlens, self.scale))

    return PictureAttention


def moon_attention(parent: type[nn.Module]) -> type[nn.Module]:
    """Subclass MoonViT's attention, which rotates by complex numbers, to need no mask."""

    class MoonAttention(parent):  # type: ignore[misc,valid-type]
        def __call__(
            self,
            x: mx.array,
            cu_seqlens: mx.array,
            rotary_pos_emb: mx.array,
            attention_mask: mx.array | None = None,
        ) -> mx.array:
            split = self.wqkv(x).reshape(x.shape[0], 3, self.num_heads, -1)
            turn = once(rotary_pos_emb, turn_by_numbers)
            return self.wo(_attend_turned(split, turn, cu_seqlens, self.scale, axis=-1))

    return MoonAttention


def runs_between(boundaries: mx.array) -> tuple[Run, ...]:
    """Return runs of equal, non-empty pictures from boundaries 0, ..., N."""
    lengths = np.diff(np.array(boundaries)).tolist()
    return tuple((len(list(group)), size) for size, group in groupby(lengths) if size)


def turn_by(angles: mx.array) -> RotationFactors:
    """Return the rotation by angles (N, D / 2) of pairs half a head apart."""
    cos, sin = mx.cos(angles.astype(mx.float32)), mx.sin(angles.astype(mx.float32))
    return mx.stack([cos, sin], axis=-2)[:, None], mx.stack([-sin, cos], axis=-2)[
        :, None
    ]


def turn_by_numbers(turned: mx.array) -> RotationFactors:
    """Return the rotation by complex numbers (N, D / 2) of neighbours."""
    cos, sin = mx.real(turned), mx.imag(turned)
    return mx.stack([cos, sin], axis=-1)[:, None], mx.stack([-sin, cos], axis=-1)[
        :, None
    ]
