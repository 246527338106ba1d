"""One budget of bytes for everything that is kept in case it is needed again; what was used longest ago goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable

import mlx.core as mx

#: Bytes that an array takes beside its numbers, in MLX and in Python (docs/benchmarks.md, caches).
ARRAY_BYTES = 800


def footprint(arrays: Iterable[mx.array]) -> int:
    """Bytes that arrays of their own take in memory."""
    return sum(array.nbytes + ARRAY_BYTES for array in arrays)


class ByteBudget:
    """Holds sizes, not things: an owner adds what it keeps with a ``drop`` that lets go of it.

    Owners that share a budget (saved rows, vision features) push each other's oldest things out.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: OrderedDict[Hashable, tuple[int, Callable[[], None]]] = OrderedDict()
        self._nbytes = 0  # of ``_held``; changed by _put and _pop alone

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """The sum of all sizes that are held."""
        return self._nbytes

    def add(self, key: Hashable, nbytes: int, drop: Callable[[], None]) -> bool:
        """Make room for a thing and hold it; what the owner held under that key is replaced, without its ``drop``.

        False, and nothing changes, if it is larger than the whole budget.
        """
        if nbytes > self.max_bytes:
            return False
        if key in self._held:
            self._pop(key)
        while self._nbytes + nbytes > self.max_bytes:
            self._drop_oldest()
        self._put(key, nbytes, drop)
        return True

    def touch(self, key: Hashable) -> None:
        """It was used just now."""
        self._held.move_to_end(key)

    def remove(self, key: Hashable) -> None:
        """Its owner has let go of it; a key that is not held is none."""
        if key in self._held:
            self._pop(key)

    def clear(self) -> None:
        """Drop everything."""
        while self._held:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        drop = self._pop(next(iter(self._held)))
        drop()

    def _put(self, key: Hashable, nbytes: int, drop: Callable[[], None]) -> None:
        self._held[key] = (nbytes, drop)
        self._nbytes += nbytes

    def _pop(self, key: Hashable) -> Callable[[], None]:
        nbytes, drop = self._held.pop(key)
        self._nbytes -= nbytes
        return drop
