"""Runs: consecutive windows or pictures of one size, whose attention is one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from vlm_batch.arrays import joined

Run = tuple[int, int]  # (number of consecutive windows, patches in each)


def in_runs(
    attend: Callable[..., mx.array],
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    runs: Sequence[Run],
    scale: float,
) -> mx.array:
    """Attend within windows of patches (N, H, D), one ``attend`` a run: (N, H * D)."""
    outputs, start = [], 0
    for count, length in runs:
        stop = start + count * length
        parts = [
            part[start:stop].reshape(count, length, *part.shape[1:]).swapaxes(1, 2)
            for part in (queries, keys, values)
        ]
        attended = attend(*parts, scale)  # (count, H, length, D)
        outputs.append(attended.swapaxes(1, 2).reshape(count * length, -1))
        start = stop
    return joined(outputs)
