"""Attention of a vision tower's patches, which lie one picture after another: within windows, or each picture within itself.

mlx-vlm calls attention once a window. It cuts pictures apart at boundaries that it reads back from the device three times in
every block, or masks them apart in one attention over all of them, and takes cosines and sines anew for queries and keys of
every block. Here boundaries are read and the rotation is made once for all blocks, and windows or pictures of one size that
follow each other share a call.
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

#: Factors of the first and of the second number of each pair: (N, 1, 2, D / 2), or (N, 1, D / 2, 2) of neighbours.
Turn = tuple[mx.array, mx.array]
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


def rotate(x: mx.array, turn: Turn, axis: int = -2) -> mx.array:
    """Rotary embedding in float32 of queries and keys (2, N, H, D), whose pairs lie half a head apart (axis -2) or side by
    side (axis -1): the first number of each by one array, the second by the other, so that nothing is joined."""
    pairs = x.reshape(*x.shape[:-1], *((2, -1) if axis == -2 else (-1, 2)))
    first, second = (pairs[..., :1, :], pairs[..., 1:, :]) if axis == -2 else (pairs[..., :1], pairs[..., 1:])
    return kernels.turn_pairs(first, second, *turn).reshape(x.shape)


def attend_runs(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    runs: Sequence[Run],
    scale: float,
    attend: Callable[..., mx.array] | None = None,
) -> mx.array:
    """Attention of patches (N, H, D) within their window, one call for each run of windows of one size: (N, H * D).

    ``attend`` is how each is computed, by default as pictures are."""
    attend = attend or kernels.attend_all
    outputs, start = [], 0
    for count, length in runs:
        stop = start + count * length
        parts = [
            part[start:stop].reshape(count, length, *part.shape[1:]).swapaxes(1, 2) for part in (queries, keys, values)
        ]
        attended = attend(parts[0], parts[1], parts[2], scale)  # (count, H, length, D)
        outputs.append(attended.swapaxes(1, 2).reshape(count * length, -1))
        start = stop
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


@dataclass(frozen=True)
class Windows:
    """Windows of patches that follow each other, the largest first, and the calls of few shapes which they fill: whole ones in
    a call of as many as such a call has, those that are left with some of these once more, and smaller ones filled up to the
    size of whole ones, behind a mask. So the kernel that a window has goes by its size, and not by its place."""

    size: int  # patches of a whole one
    whole: int
    first: int  # whole windows of the first call
    again: int  # the last whole windows, of which as many as the first call leaves are new
    lengths: tuple[int, ...]  # of the call of smaller ones: the patches of each window that are there
    #: (len(lengths) * size,) the patches of smaller ones, and others in the place of those that are missing.
    there: mx.array
    back: mx.array  # (patches of smaller ones,) their places among these

    def calls(self, heads: int, width: int) -> list[tuple[int, ...]]:
        """The shape (W, H, L, D) of each call."""
        return [(count, heads, self.size, width) for count in (self.first, self.again, len(self.lengths)) if count]


@lru_cache(maxsize=64)
def windows_of(runs: tuple[Run, ...], size: int) -> Windows:
    """The calls of windows of which the first are the largest; ``size`` patches are a whole one. Its arrays are made without
    an operation, so that any thread may use them."""
    every = np.repeat([length for _, length in runs], [count for count, _ in runs])
    whole = int((every == size).sum())
    first = kernels.few_to(whole, kernels.WINDOWS_STEP) or whole
    again = kernels.few_from(whole - first, kernels.WINDOWS_STEP)
    small = every[whole:]
    filled = kernels.few_from(len(small), kernels.WINDOWS_STEP)
    inside, starts = np.arange(size), whole * size + np.cumsum(small) - small
    # Of 64 bits, as other orders of patches are: a type of indices is a kernel to be built.
    there = np.zeros((filled, size), np.int64)
    there[: len(small)] = starts[:, None] + np.minimum(inside, small[:, None] - 1)
    back = np.flatnonzero(inside < small[:, None])
    lengths = (*small.tolist(), *[size] * (filled - len(small)))
    return Windows(size, whole, first, again, lengths, mx.array(there.reshape(-1)), mx.array(back))


def attend_windows(both: mx.array, values: mx.array, runs: tuple[Run, ...], size: int, scale: float) -> mx.array:
    """Attention of patches within their windows, of which ``size`` patches are a whole one: queries and keys (2, N, H, D),
    values (N, H, D) -> (N, H * D)."""
    if not kernels.takes_plans(both):
        return attend_runs(both[0], both[1], values, runs, scale)
    heads, width = values.shape[1:]
    windows = windows_of(runs, size)
    if not kernels.has_plans(windows.calls(heads, width)):  # and none of the runs' own, whose shapes are many
        return attend_runs(both[0], both[1], values, runs, scale, kernels.attend_by_queries)
    outputs = []
    for start, new, stop in ((0, 0, windows.first), (windows.whole - windows.again, windows.first, windows.whole)):
        if start < stop:
            patches = slice(start * size, stop * size)
            attended = _attend_filled((both[0, patches], both[1, patches], values[patches]), size, None, scale)
            outputs.append(attended[(new - start) * size :])
    if windows.lengths:
        queries, keys = mx.take(both, windows.there, axis=1)
        mask = kernels.mask_of(windows.lengths, size, values.dtype)
        attended = _attend_filled((queries, keys, values[windows.there]), size, mask, scale)
        outputs.append(attended[windows.back])
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _attend_filled(parts: Sequence[mx.array], size: int, mask: mx.array | None, scale: float) -> mx.array:
    """Attention of whole windows' patches (W * size, H, D) within each: (W * size, H * D)."""
    queries, keys, values = (part.reshape(-1, size, *part.shape[1:]).swapaxes(1, 2) for part in parts)
    attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    return attended.swapaxes(1, 2).reshape(len(parts[0]), -1)


def merge_runs(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Neighbouring runs of one size as one."""
    return tuple((sum(count for count, _ in group), size) for size, group in groupby(runs, key=lambda run: run[1]))


def attend_pictures(parent: type[nn.Module], project: str = "qkv", output: str = "proj") -> type[nn.Module]:
    """The same attention of patches (N, D) of several pictures, whose boundaries are 0, ..., N, turned by angles (N, D / 2).

    ``project`` and ``output`` name the module's projections.
    """

    class PictureAttention(parent):  # type: ignore[misc,valid-type]
        def __call__(self, x: mx.array, cu_seqlens: mx.array, rotary_pos_emb: mx.array) -> mx.array:
            """(N, D) -> (N, D)"""
            split = self[project](x).reshape(x.shape[0], 3, self.num_heads, -1)
            queries, keys = rotate(split[:, :2].swapaxes(0, 1), kernels.once(rotary_pos_emb, turn_by))
            return self[output](
                attend_runs(queries, keys, split[:, 2], kernels.once(cu_seqlens, runs_between), self.scale)
            )

    return PictureAttention


def moon_attention(parent: type[nn.Module]) -> type[nn.Module]:
    """MoonViT's, whose queries and keys are turned as complex numbers; it goes without the mask that the encoder makes."""

    class MoonAttention(parent):  # type: ignore[misc,valid-type]
        def __call__(
            self, x: mx.array, cu_seqlens: mx.array, rotary_pos_emb: mx.array, attention_mask: mx.array | None = None
        ) -> mx.array:
            """(N, D) -> (N, D)"""
            split = self.wqkv(x).reshape(x.shape[0], 3, self.num_heads, -1)
            turn = kernels.once(rotary_pos_emb, turn_by_numbers)
            queries, keys = rotate(split[:, :2].swapaxes(0, 1), turn, axis=-1)
            return self.wo(attend_runs(queries, keys, split[:, 2], kernels.once(cu_seqlens, runs_between), self.scale))

    return MoonAttention


def runs_between(boundaries: mx.array) -> tuple[Run, ...]:
    """Runs of pictures of one size, of boundaries 0, ..., N; those without a patch are left out."""
    lengths = np.diff(np.array(boundaries)).tolist()
    return tuple((len(list(group)), size) for size, group in groupby(lengths) if size)


def turn_by(angles: mx.array) -> Turn:
    """The rotation by angles (N, D / 2) of pairs that lie half a head apart."""
    cos, sin = mx.cos(angles.astype(mx.float32)), mx.sin(angles.astype(mx.float32))
    return mx.stack([cos, sin], axis=-2)[:, None], mx.stack([-sin, cos], axis=-2)[:, None]


def turn_by_numbers(turned: mx.array) -> Turn:
    """The rotation by complex numbers (N, D / 2) of pairs that lie side by side."""
    cos, sin = mx.real(turned), mx.imag(turned)
    return mx.stack([cos, sin], axis=-1)[:, None], mx.stack([-sin, cos], axis=-1)[:, None]
