"""Attention within windows or pictures.

mlx-vlm calls attention per window, and each block reads boundaries from the device or masks pictures apart. Here
boundaries and rotation are made once, and equal consecutive windows share a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters import kernels

#: Factors of each pair's first and second number: (N, 1, 2, D / 2), or (N, 1, D / 2, 2) for neighbours.
RotationFactors = tuple[mx.array, mx.array]
Run = tuple[int, int]  # (number of consecutive windows, patches in each)


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
    return kernels.turn_pairs(first, second, *turn).reshape(x.shape)


def attend_runs(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    runs: Sequence[Run],
    scale: float,
    attend: Callable[..., mx.array] | None = None,
) -> mx.array:
    """Attend within windows of patches (N, H, D), one ``attend`` per run: (N, H * D)."""
    attend = attend or kernels.attend_all
    outputs, start = [], 0
    for count, length in runs:
        stop = start + count * length
        parts = [
            part[start:stop].reshape(count, length, *part.shape[1:]).swapaxes(1, 2)
            for part in (queries, keys, values)
        ]
        attended = attend(parts[0], parts[1], parts[2], scale)  # (count, H, length, D)
        outputs.append(attended.swapaxes(1, 2).reshape(count * length, -1))
        start = stop
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


@dataclass(frozen=True)
class Windows:
    """Windows in calls of few shapes: a window's kernel depends on its size alone.

    The first call has whole windows, the second the rest with repeats, the third smaller windows, padded.
    """

    size: int  # patches of a whole window
    whole: int
    first: int  # whole windows in the first call
    again: int  # whole windows in the second call, which repeats some of the first
    lengths: tuple[int, ...]  # patches of each window in the call of smaller ones
    #: (len(lengths) * size,) indices of the smaller windows' patches, with repeats as padding.
    there: mx.array
    back: mx.array  # indices of the real patches among these

    # shapes (W, H, L, D)
    def calls(self, heads: int, width: int) -> list[tuple[int, ...]]:
        return [
            (count, heads, self.size, width)
            for count in (self.first, self.again, len(self.lengths))
            if count
        ]


@lru_cache(maxsize=64)
def windows_of(runs: tuple[Run, ...], size: int) -> Windows:
    """Plan runs' calls, whole windows first; any thread may use the arrays."""
    every = np.repeat([length for _, length in runs], [count for count, _ in runs])
    whole = int((every == size).sum())
    first = kernels.few_to(whole, kernels.WINDOWS_STEP) or whole
    again = kernels.few_from(whole - first, kernels.WINDOWS_STEP)
    small = every[whole:]
    filled = kernels.few_from(len(small), kernels.WINDOWS_STEP)
    inside, starts = np.arange(size), whole * size + np.cumsum(small) - small
    # int64, as elsewhere: each index dtype is a kernel to build.
    there = np.zeros((filled, size), np.int64)
    there[: len(small)] = starts[:, None] + np.minimum(inside, small[:, None] - 1)
    back = np.flatnonzero(inside < small[:, None])
    lengths = (*small.tolist(), *[size] * (filled - len(small)))
    return Windows(
        size, whole, first, again, lengths, mx.array(there.reshape(-1)), mx.array(back)
    )


def attend_windows(
    both: mx.array, values: mx.array, runs: tuple[Run, ...], size: int, scale: float
) -> mx.array:
    """Attend by ``windows_of``: queries and keys (2, N, H, D), values (N, H, D) -> (N, H * D)."""
    if not kernels.takes_plans(both):
        return attend_runs(both[0], both[1], values, runs, scale)
    heads, width = values.shape[1:]
    windows = windows_of(runs, size)
    # runs have too many shapes for plans
    if not kernels.has_plans(windows.calls(heads, width)):
        return attend_runs(
            both[0], both[1], values, runs, scale, kernels.attend_by_queries
        )
    outputs = []
    for start, new, stop in (
        (0, 0, windows.first),
        (windows.whole - windows.again, windows.first, windows.whole),
    ):
        if start < stop:
            patches = slice(start * size, stop * size)
            attended = _attend_filled(
                (both[0, patches], both[1, patches], values[patches]), size, None, scale
            )
            outputs.append(attended[(new - start) * size :])
    if windows.lengths:
        queries, keys = mx.take(both, windows.there, axis=1)
        mask = kernels.mask_of(windows.lengths, size, values.dtype)
        attended = _attend_filled(
            (queries, keys, values[windows.there]), size, mask, scale
        )
        outputs.append(attended[windows.back])
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _attend_filled(
    parts: Sequence[mx.array], size: int, mask: mx.array | None, scale: float
) -> mx.array:
    queries, keys, values = (
        part.reshape(-1, size, *part.shape[1:]).swapaxes(1, 2) for part in parts
    )
    attended = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask
    )
    return attended.swapaxes(1, 2).reshape(len(parts[0]), -1)


def merge_runs(runs: Sequence[Run]) -> tuple[Run, ...]:
    return tuple(
        (sum(count for count, _ in group), size)
        for size, group in groupby(runs, key=lambda run: run[1])
    )


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
            queries, keys = rotate(
                split[:, :2].swapaxes(0, 1), kernels.once(rotary_pos_emb, turn_by)
            )
            return self[output](
                attend_runs(
                    queries,
                    keys,
                    split[:, 2],
                    kernels.once(cu_seqlens, runs_between),
                    self.scale,
                )
            )

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
            turn = kernels.once(rotary_pos_emb, turn_by_numbers)
            queries, keys = rotate(split[:, :2].swapaxes(0, 1), turn, axis=-1)
            return self.wo(
                attend_runs(
                    queries,
                    keys,
                    split[:, 2],
                    kernels.once(cu_seqlens, runs_between),
                    self.scale,
                )
            )

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
