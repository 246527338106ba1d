"""Arrays in trees (found, changed, split and joined), arrays that grow, and arrays carried between numpy, mlx and threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

#: Bytes of a processor's output that a row keeps until its end, in case it has to begin again: 40 megapixels or so. A row with
#: more (a long video) ends with the error where others begin again.
MOST_ON_HOST = 2**27

# Trees of lists, tuples and mappings ----------------------------------------------------------------------------------


def arrays_of(tree: Any) -> list[mx.array]:
    """Every mlx array in a tree."""
    if isinstance(tree, mx.array):
        return [tree]
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [array for item in tree for array in arrays_of(item)]


def map_arrays(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same tree with every mlx or numpy array changed, mappings as dicts; everything else as it is."""
    if isinstance(tree, (mx.array, np.ndarray)):
        return change(tree)
    if type(tree) in (list, tuple):
        return type(tree)(map_arrays(item, change) for item in tree)
    if isinstance(tree, Mapping):
        return {name: map_arrays(item, change) for name, item in tree.items()}
    return tree


def is_array_tree(tree: Any) -> bool:
    """Whether something is an array, or lists and tuples of them (or of None)."""
    if type(tree) in (list, tuple):
        return all(is_array_tree(item) for item in tree)
    return tree is None or isinstance(tree, mx.array)


def split_rows(tree: Any, counts: Sequence[int]) -> list[Any] | None:
    """One tree for each of ``counts``: its share of the first axis of every array, in proportion. None if that fails."""
    arrays = arrays_of(tree)
    total = sum(counts)
    if not is_array_tree(tree) or not arrays or any(array.ndim == 0 for array in arrays):
        return None
    if any(array.shape[0] * count % total for array in arrays for count in counts):
        return None
    bounds = itertools.pairwise([0, *itertools.accumulate(counts)])
    return [map_arrays(tree, lambda array, b=begin, e=end: _share(array, b, e, total)) for begin, end in bounds]  # type: ignore[misc]


def join_rows(trees: Sequence[Any]) -> Any:
    """The inverse of ``split_rows``."""
    first = trees[0]
    if isinstance(first, mx.array):
        return mx.concatenate(list(trees))
    return None if first is None else type(first)(join_rows(parts) for parts in zip(*trees, strict=True))


def _share(array: mx.array, begin: int, end: int, total: int) -> mx.array:
    rows = array.shape[0]
    return array[rows * begin // total : rows * end // total]


# Single arrays --------------------------------------------------------------------------------------------------------


def own_array(array: mx.array) -> mx.array:
    """The same values in an array of their own: a slice would hold on to all of what it was cut from.

    ``mx.contiguous`` shares a slice's memory if that is not more than 16 kB larger; ``mx.concatenate`` never does.
    """
    return mx.concatenate([array, array[:0]]) if array.ndim else mx.contiguous(array)


def launch(arrays: Sequence[mx.array]) -> None:
    """Have arrays computed. On a GPU nobody waits for them: what is launched next follows without a gap."""
    if mx.default_device().type == mx.DeviceType.gpu:
        mx.async_eval(*arrays)
    else:
        mx.eval(*arrays)


def grown(
    array: mx.array | None, shape: Sequence[int], dtype: mx.Dtype, *, axis: int = 2, kept: int | None = None
) -> mx.array:
    """Zeros of a shape that begin, along an axis, with an array's first ``kept`` columns (all that it has if None)."""
    room = mx.zeros(shape, dtype)
    if array is not None:
        columns = (slice(None),) * axis + (slice(array.shape[axis] if kept is None else kept),)
        room[columns] = array[columns]
    return room


def round_up(value: int, step: int) -> int:
    """The least multiple of ``step`` that is not below a value."""
    return -(-value // step) * step


def stack_logits(rows: Sequence[mx.array]) -> mx.array:
    """Rows (R, V) of logits as one array; where they differ in V, the shorter ones get columns that are never chosen."""
    widest = max(row.shape[-1] for row in rows)
    filled = [
        row if row.shape[-1] == widest else mx.pad(row, [(0, 0), (0, widest - row.shape[-1])], constant_values=-mx.inf)
        for row in rows
    ]
    return mx.concatenate(filled)


# Between mlx and numpy ------------------------------------------------------------------------------------------------


def as_numpy(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays as numpy, evaluated in the caller's thread: a lazy mlx array cannot be used from another."""
    return map_arrays(inputs, _to_numpy)  # type: ignore[no-any-return]


def on_host(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of arrays as numpy, where numpy has their type, so that no device holds them; ``as_mlx`` gives them back."""
    return map_arrays(inputs, _to_host)  # type: ignore[no-any-return]


def num_bytes(tree: Any) -> int:
    """Bytes of every mlx and numpy array in a tree."""
    if isinstance(tree, (mx.array, np.ndarray)):
        return int(tree.nbytes)
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return 0
    return sum(map(num_bytes, tree))


def as_mlx(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Numpy arrays as mlx arrays; everything else as it is."""
    return map_arrays(inputs, _to_mlx)  # type: ignore[no-any-return]


def settled(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays as mlx arrays that any thread may use: evaluated by the caller's, half-precision ones as float32."""
    halves = (mx.bfloat16, mx.float16)
    found: dict[str, Any] = map_arrays(
        as_mlx(inputs), lambda array: array.astype(mx.float32) if array.dtype in halves else array
    )
    mx.eval(arrays_of(found))
    return found


def _to_numpy(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    return np.array(array.astype(mx.float32) if array.dtype in (mx.bfloat16, mx.float16) else array)


def _to_host(array: Any) -> Any:
    is_numpys = isinstance(array, np.ndarray) or array.dtype in (mx.bfloat16, mx.complex64)
    return array if is_numpys else np.array(array)


def _to_mlx(array: Any) -> mx.array:
    if isinstance(array, mx.array):
        return array
    is_reversed = any(stride < 0 for stride in array.strides)  # which mlx does not take
    return mx.array(array.copy() if is_reversed else array)
