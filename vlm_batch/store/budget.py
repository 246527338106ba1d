"""One budget of bytes for everything that is kept in case it is needed again; what was used longest ago goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable


class ByteBudget:
    """Holds sizes, not things: an owner adds what it keeps with a ``drop`` that lets go of it.

    Owners that share a budget (saved rows, vision features) push each other's oldest things out.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._held: OrderedDict[Hashable, tuple[int, Callable[[], None]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, key: Hashable, nbytes: int, drop: Callable[[], None]) -> bool:
        """Make room for a new thing; False, and nothing goes, if it is larger than the whole budget."""
        if nbytes > self.max_bytes:
            return False
        self._held[key] = (nbytes, drop)
        self.nbytes += nbytes
        while self.nbytes > self.max_bytes:
            self._drop_oldest()
        return True

    def touch(self, key: Hashable) -> None:
        """It was used just now."""
        self._held.move_to_end(key)

    def remove(self, key: Hashable) -> None:
        """Its owner has let go of it."""
        self.nbytes -= self._held.pop(key)[0]

    def clear(self) -> None:
        """Drop everything."""
        while self._held:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, (nbytes, drop) = self._held.popitem(last=False)
        self.nbytes -= nbytes
        drop()
