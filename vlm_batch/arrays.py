"""Arrays in trees: found, stacked, and carried to numpy and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np


def arrays_of(tree: Any) -> list[mx.array]:
    """Every array in a tree of lists and tuples."""
    if isinstance(tree, mx.array):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [array for item in tree for array in arrays_of(item)]
    return []


def stack_logits(rows: Sequence[mx.array]) -> mx.array:
    """Rows (1, V) of logits as one array; where they differ in V, the shorter ones get columns that are never chosen."""
    widest = max(row.shape[-1] for row in rows)
    filled = [
        row if row.shape[-1] == widest else mx.pad(row, [(0, 0), (0, widest - row.shape[-1])], constant_values=-mx.inf)
        for row in rows
    ]
    return mx.concatenate(filled)


def as_numpy(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays as numpy, evaluated in the caller's thread: a lazy mlx array cannot be used from another."""
    return {name: _map_arrays(value, _to_numpy) for name, value in inputs.items()}


def as_mlx(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Numpy arrays as mlx arrays; everything else as it is."""
    return {name: _map_arrays(value, _to_mlx) for name, value in inputs.items()}


def _map_arrays(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (mx.array, np.ndarray)):
        return change(value)
    if isinstance(value, list):
        return [_map_arrays(item, change) for item in value]
    return value


def _to_numpy(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    return np.array(array.astype(mx.float32) if array.dtype in (mx.bfloat16, mx.float16) else array)


def _to_mlx(array: Any) -> mx.array:
    return array if isinstance(array, mx.array) else mx.array(array)
