"""One budget of bytes for everything that is kept for later requests; the entry that was used longest ago is dropped first."""

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
    """Counts the bytes of entries that others hold. An owner adds an entry with a ``drop``, which frees it.

    Owners that share a budget (saved rows, vision features) push out each other's oldest entries.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: OrderedDict[Hashable, tuple[int, Callable[[], None]]] = OrderedDict()
        self.nbytes = 0  # of all entries

    def __len__(self) -> int:
        return len(self._held)

    def add(self, key: Hashable, nbytes: int, drop: Callable[[], None]) -> bool:
        """Make room for an entry and count it; it replaces the owner's entry under the same key, whose ``drop`` is not called.

        False, and nothing changes, if it is larger than the whole budget.
        """
        if nbytes > self.max_bytes:
            return False
        self.remove(key)
        while self.nbytes + nbytes > self.max_bytes:
            self._drop_oldest()
        self._held[key] = (nbytes, drop)
        self.nbytes += nbytes
        return True

    def touch(self, key: Hashable) -> None:
        """Note that an entry is used now, so that it is dropped last."""
        self._held.move_to_end(key)

    def remove(self, key: Hashable) -> None:
        """Stop counting an entry that its owner has freed. A key without an entry is no error."""
        if (held := self._held.pop(key, None)) is not None:
            self.nbytes -= held[0]

    def clear(self) -> None:
        """Drop everything."""
        while self._held:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, (nbytes, drop) = self._held.popitem(last=False)
        self.nbytes -= nbytes
        drop()
