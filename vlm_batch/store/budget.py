"""One budget of bytes for all that is kept, with LRU eviction.

``ENTRIES`` additions without a find that needed the room halve it, down to ``LITTLE``. A find grows it to ``TIMES`` the
bytes added since the entry's last use. So does the return of a dropped entry that the whole budget would have held.
Jobs over different pictures thus keep little, and repeated ones get room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from vlm_batch.runtime.memory import trim

#: The least room, in bytes.
LITTLE = 1 << 26
#: Entries without a find that needed the room, before it is halved.
ENTRIES = 1024
#: The room for a find, as a multiple of the bytes added since its last use.
TIMES = 8
#: Most dropped entries whose names are remembered, of some 300 bytes each.
DROPPED = 16_384
#: Overhead of an array in MLX and Python, in bytes (docs/benchmarks.md, caches).
ARRAY_BYTES = 800


def footprint(arrays: Iterable[mx.array]) -> int:
    """Return the bytes of arrays in memory."""
    return sum(array.nbytes + ARRAY_BYTES for array in arrays)


class ByteBudget:
    """Counts the bytes of owners' entries, and drops the least recently used first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: OrderedDict[Hashable, _Held] = OrderedDict()
        self.nbytes = 0  # of all entries
        self.room = max_bytes  # bytes that may be held now
        self._came = 0  # bytes ever added
        self._in_vain = 0  # entries added since a find needed the room
        # name -> bytes ever added at its last use
        self._dropped: OrderedDict[Hashable, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def add(
        self,
        key: Hashable,
        nbytes: int,
        drop: Callable[[], None],
        names: Sequence[Hashable] = (),
    ) -> bool:
        """Make room for an entry and count it. One under the same key is replaced without its ``drop``.

        Args:
            drop: Frees the entry when evicted.
            names: Names of the contents that the entry continues, then of its own. Default: its key.

        Returns:
            False, without a change, if it exceeds the whole budget.
        """
        if nbytes > self.max_bytes:
            return False
        self.remove(key)
        names = names or (key,)
        self._in_vain += 1
        for name in names:
            self._find_again(name)
        is_in_vain = self._in_vain >= ENTRIES
        if is_in_vain:
            self.room, self._in_vain = self.room // 2, 0
        self.room = min(max(self.room, LITTLE, TIMES * nbytes), self.max_bytes)
        has_dropped = self._make_room(nbytes)
        if is_in_vain and has_dropped:
            trim()
        self._came += nbytes
        self._held[key] = _Held(nbytes, drop, self._came, names[-1])
        self.nbytes += nbytes
        return True

    def touch(self, key: Hashable) -> bool:
        """Mark an entry as used. False if there is none."""
        if (held := self._held.get(key)) is None:
            return False
        self._find(held.used)
        held.used = self._came
        self._held.move_to_end(key)
        return True

    def remove(self, key: Hashable) -> None:
        """Stop counting an entry, if present."""
        if (held := self._held.pop(key, None)) is not None:
            self.nbytes -= held.nbytes

    def clear(self) -> None:
        while self._held:
            self._drop_oldest()
        self._dropped.clear()

    def _find_again(self, name: Hashable) -> None:
        """Grow if a dropped entry returns that the whole budget would have held."""
        used = self._dropped.pop(name, None)
        if used is not None and self._came - used <= self.max_bytes:
            self._find(used)

    def _make_room(self, nbytes: int) -> bool:
        """Drop entries until ``nbytes`` more fit. True if any was dropped."""
        before = self.nbytes
        while self.nbytes + nbytes > self.room:
            self._drop_oldest()
        return self.nbytes < before

    def _find(self, used: int) -> None:
        """Grow for an entry last used at ``used`` bytes."""
        needed = min(TIMES * (self._came - used), self.max_bytes)
        if needed >= self.room:
            self.room, self._in_vain = needed, 0

    def _drop_oldest(self) -> None:
        _, held = self._held.popitem(last=False)
        self.nbytes -= held.nbytes
        self._dropped[held.name] = held.used
        if len(self._dropped) > DROPPED:
            self._dropped.popitem(last=False)
        held.drop()


@dataclass(slots=True)
class _Held:
    nbytes: int
    drop: Callable[[], None]
    used: int  # bytes ever added, at its last use
    name: Hashable
