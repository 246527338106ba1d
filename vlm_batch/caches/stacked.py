"""Rows of one length that stay one array while they decode, in a layer where every row keeps its own cache.

Pictures of one size with one prompt are prefilled together and decode side by side. As one array their attention is one call,
and a token one write; on a CPU such a step takes less time in launching small operations. A row that leaves takes the array
apart: the others are copied once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import mlx.core as mx
from mlx_vlm.models.cache import KVCache, cache_nbytes

from vlm_batch.arrays import arrays_of, own_array
from vlm_batch.caches.rows import RowsCache, RowStates, Run

#: The longest rows that are made one array: a longer one is mostly read, and to copy it is not worth it.
MOST_STACKED = 1024


@dataclass(frozen=True)
class Member:
    """The row at ``index`` of several that are one array: what stands for its own cache at its place."""

    stack: KVCache  # (R, H, L, D)
    index: int

    @property
    def offset(self) -> int:
        return int(self.stack.offset)

    def apart(self) -> KVCache:
        """Its own single-row cache, with arrays of its own."""
        own, stack = KVCache(), self.stack
        own.keys, own.values = (own_array(part[self.index : self.index + 1]) for part in (stack.keys, stack.values))
        own.offset = stack.offset
        return own


class StackedRowsCache(RowsCache):
    """A layer of full attention. Neighbours of one length that come together are made one array (``may_stack``)."""

    def __init__(self) -> None:
        super().__init__()
        self.may_stack = True
        self._new: WeakSet[Any] = WeakSet()  # the caches that came since the last token, while they are here

    def put(self, place: int, cache: Any) -> None:
        super().put(place, cache)
        self._new.add(cache)

    def take(self, place: int) -> Any:
        taken = self.places[place]
        return taken.apart() if isinstance(taken, Member) else taken

    def clear(self, place: int) -> None:
        self._take_apart(place)
        super().clear(place)

    def remove(self, place: int) -> None:
        self._take_apart(place)
        super().remove(place)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowStates, RowStates]:
        if self._new:
            self._stack_new()
        if not self._stacks():
            return super().update_and_fetch(keys, values)
        return self._states_of(lambda cache, first, end: cache.update_and_fetch(keys[first:end], values[first:end]))

    def fetch(self) -> tuple[RowStates, RowStates]:
        return self._states_of(lambda cache, first, end: cache.state)

    @property
    def nbytes(self) -> int:
        return sum(cache_nbytes(cache) for cache in self._caches())

    def arrays(self) -> list[mx.array]:
        return arrays_of([cache.state for cache in self._caches() if cache is not None])

    def make_mask(self, length: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if not self._stacks():
            return super().make_mask(length, window_size, return_array)
        if length != 1:
            raise ValueError(f"a batch decodes one token a row, not {length}")
        return None  # a KVCache's for one token

    def _states_of(self, state: Any) -> tuple[RowStates, RowStates]:
        """Keys and values of all places; ``state(cache, first, end)`` gives those of a place, or of a run of them."""
        rows: list[tuple[Any, Any]] = []
        runs: list[tuple[Run, Run]] = []
        while len(rows) < len(self.places):
            first, held = len(rows), self.places[len(rows)]
            if not isinstance(held, Member):
                rows.append((None, None) if held is None else state(held, first, first + 1))
                continue
            end = first + held.stack.keys.shape[0]
            keys, values = state(held.stack, first, end)
            runs.append((Run(first, end, keys, held.stack), Run(first, end, values, held.stack)))
            rows += [(keys[i : i + 1], values[i : i + 1]) for i in range(end - first)]
        caches = tuple(held.stack if isinstance(held, Member) else held for held in self.places)
        return (
            RowStates(tuple(row[0] for row in rows), caches, tuple(run[0] for run in runs)),
            RowStates(tuple(row[1] for row in rows), caches, tuple(run[1] for run in runs)),
        )

    def _stacks(self) -> bool:
        return any(isinstance(held, Member) for held in self.places)

    def _caches(self) -> list[Any]:
        """The single-row caches, and those of several rows once each."""
        singles = [held for held in self.places if not isinstance(held, Member)]
        return singles + [held.stack for held in self.places if isinstance(held, Member) and held.index == 0]

    def _stack_new(self) -> None:
        """Make one array of each run of neighbours that came since the last token and have one length and shape."""
        new, self._new = self._new, WeakSet()
        if not self.may_stack or len(new) < 2:
            return
        kinds = [_kind(held) if held is not None and held in new else None for held in self.places]
        cuts = [0, *(at for at in range(1, len(kinds)) if kinds[at] != kinds[at - 1]), len(kinds)]
        for first, end in pairwise(cuts):
            if end - first > 1 and kinds[first] is not None:
                stack = _stacked(self.places[first:end])
                self.places[first:end] = [Member(stack, index) for index in range(end - first)]

    def _take_apart(self, place: int) -> None:
        """Give each row of an array its own cache again."""
        held = self.places[place]
        if isinstance(held, Member):
            first, end = place - held.index, place - held.index + held.stack.keys.shape[0]
            self.places[first:end] = [Member(held.stack, index).apart() for index in range(end - first)]


def _kind(held: Any) -> tuple[Any, ...] | None:
    """Equal for rows that can be one array; None for what cannot."""
    if type(held) is not KVCache or held.keys is None or held.offset > MOST_STACKED:
        return None
    return (held.offset, held.keys.shape, held.values.shape, held.keys.dtype, held.values.dtype)


def _stacked(rows: Sequence[KVCache]) -> KVCache:
    stack = KVCache()
    stack.keys = mx.concatenate([row.keys for row in rows])
    stack.values = mx.concatenate([row.values for row in rows])
    stack.offset = rows[0].offset
    return stack
