"""Small integers that stay known on the host.

mlx-vlm's code asks grids, sizes and ids for their values, one at a time. On a GPU each answer waits for all work that was
launched before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

#: Most numbers of an array that stays known.
MOST = 1 << 16
_INDEX = (int, slice, type(None), type(Ellipsis))


class HostIntegers(mx.array):
    """Integers or truths whose parts, comparisons and sums are computed on the host, and are known, too.

    MLX's own functions take it as any array, and answer with arrays that are yet to be computed.
    """

    _own: np.ndarray

    __hash__ = mx.array.__hash__

    @property
    def numbers(self) -> np.ndarray:
        """The values."""
        if "_own" not in vars(self):
            self._own = np.array(self)
        return self._own

    def __setitem__(self, at: Any, value: Any) -> None:
        vars(self).pop("_own", None)
        super().__setitem__(at, value)

    def __getitem__(self, at: Any) -> Any:
        indices = at if isinstance(at, tuple) else (at,)
        for index in indices:
            if isinstance(index, bool) or not isinstance(index, _INDEX):
                return super().__getitem__(at)
        return known(self.numbers[at])

    def __iter__(self) -> Any:
        return map(known, self.numbers)

    def _compared(self, compare: Callable[[Any, Any], Any], other: Any) -> Any:
        given = other.numbers if isinstance(other, HostIntegers) else other
        is_whole = isinstance(given, int)
        if isinstance(given, np.ndarray):
            is_whole = given.dtype.kind in "iub"
        if is_whole:
            return known(compare(self.numbers, given))
        theirs = getattr(mx.array, f"__{compare.__name__.rstrip('_')}__")
        return theirs(self, other)

    def _reduced(
        self, name: str, axis: Any = None, keepdims: bool = False, **how: Any
    ) -> Any:
        theirs: mx.array = getattr(mx.array, name)(self, axis, keepdims, **how)
        dtype, axes = theirs.dtype, tuple(axis) if isinstance(axis, list) else axis
        found = np.asarray(getattr(self.numbers, name)(axis=axes, keepdims=keepdims))
        return known(found.astype(str(dtype).removeprefix("mlx.core.").rstrip("_")))


def _comparing(
    compare: Callable[[Any, Any], Any],
) -> Callable[[HostIntegers, Any], Any]:
    return lambda self, other: self._compared(compare, other)


def _reducing(name: str) -> Callable[..., Any]:
    return lambda self, *args, **how: self._reduced(name, *args, **how)


def _changing(change: Callable[..., Any]) -> Callable[[HostIntegers, Any], Any]:
    def changed(self: HostIntegers, other: Any) -> Any:
        vars(self).pop("_own", None)
        return change(self, other)

    return changed


for one in (
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.and_,
    operator.or_,
):
    setattr(HostIntegers, f"__{one.__name__.rstrip('_')}__", _comparing(one))
for name in ("sum", "prod", "max", "min", "any", "all"):
    setattr(HostIntegers, name, _reducing(name))
for name in vars(mx.array):  # x += 1
    if name.startswith("__i") and hasattr(operator, f"__{name[3:]}"):
        setattr(HostIntegers, name, _changing(getattr(mx.array, name)))


def known(numbers: Any) -> Any:
    """Return numbers of the host as ``HostIntegers``."""
    own = np.empty(np.shape(numbers), np.asarray(numbers).dtype)
    own[...] = numbers  # a copy without negative strides, which MLX does not take
    return HostIntegers(own)


def know(value: Any) -> Any:
    """Return an evaluated array of few integers as ``HostIntegers``, anything else as it is."""
    if type(value) is not mx.array or value.size > MOST:
        return value
    if value.dtype != mx.bool_ and not mx.issubdtype(value.dtype, mx.integer):
        return value
    return known(np.array(value))


def concatenated(parts: Sequence[mx.array]) -> mx.array:
    """Concatenate arrays along the first axis; the result is known if all are."""
    numbers = [part.numbers for part in parts if isinstance(part, HostIntegers)]
    return (
        known(np.concatenate(numbers))
        if len(numbers) == len(parts)
        else mx.concatenate(list(parts))
    )
