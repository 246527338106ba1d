"""Arrays in trees, alone, and between numpy, mlx and threads."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

#: Most bytes of a processor's output, about 40 megapixels, that a row keeps to be recomputed from. A row with more, such as a
#: long video, fails where others are recomputed.
MOST_ON_HOST = 2**27

# Trees of lists, tuples and mappings ----------------------------------------------------------------------------------


def arrays_of(tree: Any) -> list[mx.array]:
    """Return every mlx array in a tree."""
    if isinstance(tree, mx.array):
        return [tree]
    found: list[mx.array] = []
    for item in _items(tree):
        found += arrays_of(item)
    return found


def _items(tree: Any) -> Iterable[Any]:
    """Return what a list, tuple or mapping holds; nothing for anything else."""
    if isinstance(tree, Mapping):
        return tree.values()
    return tree if isinstance(tree, (list, tuple)) else ()


class Deferred(ABC):
    """An array of ``nbytes``, made when needed."""

    nbytes: int
    shape: tuple[int, ...]

    @abstractmethod
    def array(self) -> mx.array:
        """Make the array, unevaluated, on the caller's thread."""


class Joined(tuple[Any, ...]):
    """Arrays, some ``Deferred``, that are one along the first axis. Unread parts are never made."""

    __slots__ = ()


def map_arrays(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Change every mlx or numpy array of a tree."""
    if isinstance(tree, (mx.array, np.ndarray)):
        return change(tree)
    if type(tree) in (list, tuple, Joined):
        return type(tree)(map_arrays(item, change) for item in tree)
    if isinstance(tree, Mapping):
        return {name: map_arrays(item, change) for name, item in tree.items()}
    return tree


def is_array_tree(tree: Any) -> bool:
    """Return whether a tree holds only arrays or None."""
    if type(tree) in (list, tuple):
        return all(map(is_array_tree, tree))
    return tree is None or isinstance(tree, mx.array)


def split_rows(tree: Any, counts: Sequence[int]) -> list[Any] | None:
    """Split a tree's arrays along the first axis in proportion to ``counts``; None if impossible."""
    arrays = arrays_of(tree)
    if not arrays or not is_array_tree(tree):
        return None
    total = sum(counts)
    # rows of which each count has a whole number
    least = total // math.gcd(*counts)
    if any(array.ndim == 0 or array.shape[0] % least for array in arrays):
        return None
    shares: list[Any] = []
    for begin, end in itertools.pairwise([0, *itertools.accumulate(counts)]):
        share = partial(_share, begin=begin, end=end, total=total)
        shares.append(map_arrays(tree, share))
    return shares


def join_rows(trees: Sequence[Any]) -> Any:
    """Join trees' arrays along the first axis, as ``split_rows`` parts them."""
    if len(trees) == 1:
        return trees[0]
    return tree_map(_joined_or_none, *trees)


def _joined_or_none(*parts: Any) -> mx.array | None:
    return None if parts[0] is None else mx.concatenate(list(parts))


def _share(array: mx.array, begin: int, end: int, total: int) -> mx.array:
    rows = array.shape[0]
    return array[rows * begin // total : rows * end // total]


# Single arrays --------------------------------------------------------------------------------------------------------


def own_array(array: mx.array) -> mx.array:
    """Copy an array, so that no slice keeps its base alive.

    ``mx.contiguous`` shares memory up to 16 kB larger; ``mx.concatenate`` shares none.
    """
    if array.ndim:
        return mx.concatenate([array, array[:0]])
    return mx.contiguous(array)


def launch(arrays: Sequence[mx.array]) -> None:
    """Evaluate arrays, on a GPU without waiting."""
    if mx.default_device().type == mx.DeviceType.gpu:
        mx.async_eval(*arrays)
    else:
        mx.eval(*arrays)


def grown(
    array: mx.array | None,
    shape: Sequence[int],
    dtype: mx.Dtype,
    *,
    axis: int = 2,
    kept: int | None = None,
) -> mx.array:
    """Return an array's ``kept`` columns, then zeros, along ``axis``."""
    room = mx.zeros(shape, dtype)
    if array is None:
        return room
    if kept is None:
        kept = array.shape[axis]
    columns = (*[slice(None)] * axis, slice(kept))
    room[columns] = array[columns]
    return room


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@lru_cache(maxsize=8)
def lengths_array(lengths: tuple[int, ...]) -> mx.array:
    """Return lengths as an array (B,), made once per step."""
    return mx.array(lengths, dtype=mx.int32)


def stack_logits(rows: Sequence[mx.array]) -> mx.array:
    """Stack logits (R, V), narrow ones padded with -inf."""
    widest = max(row.shape[-1] for row in rows)
    filled = []
    for row in rows:
        missing = widest - row.shape[-1]
        if missing:
            row = mx.pad(row, [(0, 0), (0, missing)], constant_values=-mx.inf)
        filled.append(row)
    return mx.concatenate(filled)


# Between mlx and numpy ------------------------------------------------------------------------------------------------


def as_numpy(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays as numpy: no other thread can use lazy mlx arrays."""
    whole = {name: _whole(value) for name, value in inputs.items()}
    return map_arrays(whole, _to_numpy)  # type: ignore[no-any-return]


def on_host(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Copy arrays to numpy where it has their type. ``as_mlx`` undoes it."""
    return map_arrays(inputs, _to_host)  # type: ignore[no-any-return]


def num_bytes(tree: Any) -> int:
    if isinstance(tree, (mx.array, np.ndarray, Deferred)):
        return int(tree.nbytes)
    return sum(map(num_bytes, _items(tree)))


def as_mlx(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return map_arrays(inputs, _to_mlx)  # type: ignore[no-any-return]


def evaluated(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return evaluated mlx arrays for any thread; half precision becomes float32."""
    found: dict[str, Any] = map_arrays(as_mlx(inputs), _widened)
    mx.eval(arrays_of(found))
    return found


def _whole(value: Any) -> Any:
    if not isinstance(value, Joined):
        return value
    return mx.concatenate(list(map(_made, value)))


def _made(part: Any) -> mx.array:
    if isinstance(part, Deferred):
        return part.array()
    return _to_mlx(part)


def _widened(array: mx.array) -> mx.array:
    """Return half precision as float32, which numpy has, too."""
    if array.dtype in (mx.bfloat16, mx.float16):
        return array.astype(mx.float32)
    return array


def _to_numpy(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    return np.array(_widened(array))


def _to_host(array: Any) -> Any:
    if isinstance(array, np.ndarray) or array.dtype in (mx.bfloat16, mx.complex64):
        return array
    return np.array(array)


def _to_mlx(array: Any) -> mx.array:
    if isinstance(array, mx.array):
        return array
    if min(array.strides, default=0) < 0:  # which mlx does not take
        array = array.copy()
    return mx.array(array)


def joined(parts: Sequence[mx.array], axis: int = 0) -> mx.array:
    """Concatenate arrays; one alone stays the object that it is."""
    if len(parts) == 1:
        return parts[0]
    return mx.concatenate(list(parts), axis=axis)
