"""Attention within windows, in calls of few shapes: cuDNN plans each (``plans``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.cuda import plans
from vlm_batch.adapters.runs import Run, in_runs
from vlm_batch.arrays import joined

#: The smallest steps between numbers of windows.
WINDOWS_STEP = 16


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
    first = plans.few_to(whole, WINDOWS_STEP) or whole
    again = plans.few_from(whole - first, WINDOWS_STEP)
    small = every[whole:]
    filled = plans.few_from(len(small), WINDOWS_STEP)
    inside, starts = np.arange(size), whole * size + np.cumsum(small) - small
    # int64, as elsewhere: each index dtype is a kernel to build.
    there = np.zeros((filled, size), np.int64)
    there[: len(small)] = starts[:, None] + np.minimum(inside, small[:, None] - 1)
    back = np.flatnonzero(inside < small[:, None])
    lengths = (*small.tolist(), *[size] * (filled - len(small)))
    return Windows(
        size, whole, first, again, lengths, mx.array(there.reshape(-1)), mx.array(back)
    )


def attend(
    both: mx.array, values: mx.array, runs: tuple[Run, ...], size: int, scale: float
) -> mx.array:
    """Attend by ``windows_of``: queries and keys (2, N, H, D), values (N, H, D) -> (N, H * D)."""
    heads, width = values.shape[1:]
    windows = windows_of(runs, size)
    # runs have too many shapes for plans
    if not plans.has_plans(windows.calls(heads, width)):
        by_queries = plans.attend_by_queries
        return in_runs(by_queries, both[0], both[1], values, runs, scale)
    outputs = []
    begins = windows.whole - windows.again
    for start, new, stop in (
        (0, 0, windows.first),
        (begins, windows.first, windows.whole),
    ):
        if start == stop:
            continue
        patches = slice(start * size, stop * size)
        parts = (both[0, patches], both[1, patches], values[patches])
        attended = _attend_filled(parts, size, None, scale)
        outputs.append(attended[(new - start) * size :])
    if windows.lengths:
        queries, keys = mx.take(both, windows.there, axis=1)
        mask = plans.mask_of(windows.lengths, size, values.dtype)
        parts = (queries, keys, values[windows.there])
        attended = _attend_filled(parts, size, mask, scale)
        outputs.append(attended[windows.back])
    return joined(outputs)


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
