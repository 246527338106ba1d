"""One recurrent layer of a batch (state-space, linear attention, short convolution): a state of fixed size for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache

from vlm_batch.arrays import grown, own_array
from vlm_batch.caches.layers import LayerCache, Placement, UpstreamKind, upstream
from vlm_batch.caches.states import LayerState, filed


class RecurrentCache(ArraysCache):
    """The rows' states side by side: slot i holds (B, ...), whatever the placement. An empty place's state is never read.

    To a model it is mlx-vlm's ``ArraysCache`` of B rows without padding. A decode step makes every state anew, so a
    join or a leave, which writes one row or closes its gap, costs no more than a step writes; no KV is involved.
    """

    cache: list[Any]

    def __init__(self) -> None:
        super().__init__(0)
        self._num_places = 0
        self._unfilled: set[tuple[int, int]] = set()  # (slot, place) whose zeros stand for nothing yet

    def __setitem__(self, slot: int, states: Any) -> None:
        """Take a slot's states of all rows, as a step has made them."""
        self._unfilled = {(other, place) for other, place in self._unfilled if other != slot}
        super().__setitem__(slot, states)

    def put(self, place: int, cache: ArraysCache) -> None:
        """Take over one row's states (1, ...); a slot that the row has not filled begins with zeros."""
        slots = self.cache or [None] * len(cache.cache)
        self._unfilled = {(slot, other) for slot, other in self._unfilled if other != place}
        self._unfilled |= {(slot, place) for slot, row in enumerate(cache.cache) if row is None}
        self.cache = [
            _put(states, place, row, self._num_places) for states, row in zip(slots, cache.cache, strict=True)
        ]

    def take(self, place: int) -> ArraysCache:
        """The row's states (1, ...) as a single-row cache."""
        cache = ArraysCache(len(self.cache))
        cache.cache = [
            None if states is None or (slot, place) in self._unfilled else mx.contiguous(states[place : place + 1])
            for slot, states in enumerate(self.cache)
        ]
        return cache

    def clear(self, place: int) -> None:
        """Free a place; its state stays until another row's is written over all of it."""

    def remove(self, place: int) -> None:
        """Forget the row at a place and close the gap."""
        self._num_places -= 1
        self._unfilled = {(slot, other - (other > place)) for slot, other in self._unfilled if other != place}
        self.cache = [
            None if states is None else mx.concatenate([states[:place], states[place + 1 :]]) for states in self.cache
        ]

    def resize(self, num_places: int) -> None:
        """Have so many places; those that are given up are empty."""
        self._num_places = num_places
        self.cache = [None if states is None else _fit(states, num_places) for states in self.cache]

    def arrays(self) -> list[mx.array]:
        """Every array that is held, to be evaluated."""
        return [states for states in self.cache if states is not None]


def _put(states: mx.array | None, place: int, row: mx.array | None, num_places: int) -> mx.array | None:
    """``states`` (B, ...) with ``row`` (1, ...) at a place."""
    if states is None and row is None:
        return None
    if row is None:
        assert states is not None
        row = mx.zeros((1, *states.shape[1:]), states.dtype)
    states = _fit(row[:0] if states is None else states, num_places)
    return mx.concatenate([states[:place], row, states[place + 1 :]])


def _fit(states: mx.array, num_places: int) -> mx.array:
    """(B, ...) cut or filled with zeros to ``num_places``."""
    if num_places <= states.shape[0]:
        return states[:num_places]
    return grown(states, (num_places, *states.shape[1:]), states.dtype, axis=0)


@filed
@dataclass(frozen=True)
class RecurrentState(LayerState):
    """States of fixed size (state-space models, linear attention, short convolutions): good for one length only."""

    slots: tuple[mx.array | None, ...]
    length: int

    def reaches(self, length: int) -> bool:
        return length == self.length

    def restore(self, length: int) -> ArraysCache:
        cache = ArraysCache(len(self.slots))
        cache.cache = [None if slot is None else slot[:] for slot in self.slots]
        return cache


@upstream(ArraysCache)
class RecurrentKind(UpstreamKind):
    """An ``ArraysCache``; slots that the model has not filled are None."""

    cache: ArraysCache

    def saved(self, length: int) -> RecurrentState:
        return RecurrentState(tuple(None if slot is None else own_array(slot) for slot in self.cache.cache), length)

    def bytes_at(self, tokens: int, seen: int) -> int:
        return sum(slot.nbytes for slot in self.cache.cache if slot is not None)

    def batched(self, placement: Placement, num_places: int) -> LayerCache:
        return RecurrentCache()
