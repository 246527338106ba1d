"""Recurrent layers: a state of fixed size per row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import ArraysCache, CacheList

from vlm_batch.arrays import grown, joined, num_bytes, own_array
from vlm_batch.caches.drafted import NO_LIMIT, Square, index_of, rows_of
from vlm_batch.caches.layers import (
    LayerCache,
    Placement,
    UpstreamKind,
    row_of,
    upstream,
)
from vlm_batch.caches.listed import parts_of
from vlm_batch.caches.states import LayerState, filed

#: A row of states (B, ...), one array per slot.
Source = tuple[Sequence[mx.array | None], int]


class RecurrentCache(LayerCache, ArraysCache):
    """The rows' states side by side, (B, ...) per slot.

    Models see mlx-vlm's ``ArraysCache``. ``keep`` chooses a row's state after a drafted forward; the next read puts it
    in place.
    """

    #: It has no mask.
    span = None
    can_trace = True  # a graph fuses operations of a recurrence
    most_positions = NO_LIMIT

    def __init__(self) -> None:
        self._states: list[Any] = []
        # by place: the states after its second, third ... position
        self._later: dict[int, list[Source]] = {}
        # by place: the state that replaces the one in ``_states``
        self._kept: dict[int, Source] = {}
        super().__init__(0)
        self._num_places = 0

    @property
    def cache(self) -> list[Any]:
        if not self._kept:
            return self._states
        kept, self._kept = self._kept, {}
        for slot, states in enumerate(list(self._states)):
            if states is not None:
                self._states[slot] = _replaced(states, slot, kept)
        return self._states

    @cache.setter
    def cache(self, states: list[Any]) -> None:
        self._states = states

    @property
    def state_bytes(self) -> int:
        return self.nbytes

    def drafted(self, counts: Sequence[int]) -> DraftedRecurrent:
        return DraftedRecurrent(self, counts)

    def draft(self, later: dict[int, list[Source]]) -> None:
        """Take states after further positions, by place."""
        self._later = later

    def keep(self, place: int, kept: int, of: int = 0) -> None:
        later = self._later.pop(place, [])
        if kept > 1:
            self._kept[place] = later[kept - 2]

    def _forget(self, place: int) -> None:
        self._later.pop(place, None)
        self._kept.pop(place, None)

    def __getitem__(self, slot: int) -> Any:
        self._later.clear()  # a forward: what is left is of empty places
        return self.cache[slot]

    def put(self, place: int, cache: ArraysCache) -> None:
        """Copy a row's states (1, ...) to a place; an unused slot begins with zeros, if others use it."""
        self._forget(place)
        slots = self.cache or [None] * len(cache.cache)
        self.cache = [
            _put(states, place, row, self._num_places)
            for states, row in zip(slots, cache.cache, strict=True)
        ]

    def extract(self, place: int) -> ArraysCache:
        cache = ArraysCache(len(self.cache))
        cache.cache = _each_used(
            lambda states: mx.contiguous(states[place : place + 1]), self.cache
        )
        return cache

    def clear(self, place: int) -> None:
        """Free a place; the next row overwrites the state."""
        self._forget(place)

    def keep_places(self, places: list[int]) -> None:
        """Keep these places, in their order, copied once."""
        at = mx.array(places)
        self._change(lambda states: mx.take(states, at, axis=0))
        self._later = {
            place: self._later[before]
            for place, before in enumerate(places)
            if before in self._later
        }
        self._num_places = len(places)

    def resize(self, num_places: int) -> None:
        for place in range(num_places, self._num_places):
            self._forget(place)
        self._num_places = num_places
        self._change(lambda states: _fit(states, num_places))

    def _change(self, change: Callable[[mx.array], mx.array]) -> None:
        # with what drafts leave
        self.cache = _each_used(change, self.cache)

    @property
    def nbytes(self) -> int:
        # another thread may ask
        return num_bytes(self._states)

    def arrays(self) -> list[mx.array]:
        return [states for states in self.cache if states is not None]

    # A compiled step ----------------------------------------------------------------------------------------------------

    def graph_key(self) -> tuple[Any, ...]:
        forms = _each_used(lambda states: (states.shape, states.dtype), self.cache)
        return tuple(forms)

    def step_inputs(self, *, is_added: bool) -> tuple[mx.array, ...]:
        return ()

    def trace(
        self, slots: Sequence[Sequence[mx.array]], made: Sequence[mx.array]
    ) -> None:
        """Work on placeholders until the next ``give``."""
        self.take(slots, 0)

    def give(self) -> tuple[tuple[mx.array, ...], ...]:
        """Hand the states to a step: one array a slot, none if unused."""
        self._later.clear()
        slots = tuple(() if states is None else (states,) for states in self.cache)
        self.cache = [None] * len(slots)
        return slots

    def take(self, slots: Sequence[Sequence[mx.array]], count: int) -> None:
        """Take states back after a step of ``count`` tokens for every place."""
        self.cache = [next(iter(one), None) for one in slots]


@dataclass(frozen=True)
class Step:
    """One position of some places, in a recurrent layer."""

    places: tuple[int, ...]
    rows: slice | mx.array  # of the forward, one for each place
    before: slice | mx.array  # the places among those of the step before


@dataclass(frozen=True)
class Steps:
    """The order in which a recurrent layer runs N positions."""

    each: tuple[Step, ...]
    num_rows: int
    order: slice | mx.array  # (N,) of the outputs of all steps, one after another

    @classmethod
    @lru_cache(maxsize=8)
    def of(cls, counts: tuple[int, ...], *, is_fixed: bool) -> Steps:
        """``is_fixed``: each step has all places, some idle."""
        each = np.array(counts)
        ends = each.cumsum()
        aheads = np.arange(max(counts))[:, None]
        # of each position of each place (count, S)
        rows = np.maximum(0, ends - each + np.minimum(aheads, each - 1))
        least = max(counts) if is_fixed else 1
        runs = aheads < np.maximum(each, least)
        numbers = runs.cumsum().reshape(runs.shape) - 1
        steps: list[Step] = []
        there = np.arange(len(counts))
        for own_rows, own_runs in zip(rows, runs, strict=True):
            places = np.flatnonzero(own_runs)
            before = np.searchsorted(there, places)
            step = Step(
                tuple(places.tolist()),
                index_of(own_rows[places].tolist()),
                index_of(before.tolist(), len(there)),
            )
            steps.append(step)
            there = places
        order = numbers.T[(aheads < each).T]
        return cls(tuple(steps), len(order), index_of(order.tolist(), runs.sum()))


#: Most positions that a square has for each that is asked for: further ones are computed for nothing.
MOST_PADDED = 1.5


class DraftedRecurrent(ArraysCache):
    """A ``RecurrentCache`` with ``counts[p]`` successive positions of place p.

    It has no slots of its own: each step lends them.
    """

    def __init__(self, layer: RecurrentCache, counts: Sequence[int]) -> None:
        super().__init__(0)
        self._layer, self._counts = layer, tuple(counts)
        self.steps = Steps.of(self._counts, is_fixed=layer.always_masked)
        #: By slot: its states before the first step, and after each that has run.
        self._slots: list[list[mx.array | None]] = [[states] for states in layer.cache]
        self._later: list[list[mx.array | None]] = [
            [None] * len(self._slots) for _ in self.steps.each[1:]
        ]
        later: dict[int, list[Source]] = {}
        for slots, step in zip(self._later, self.steps.each[1:], strict=True):
            for row, place in enumerate(step.places):
                later.setdefault(place, []).append((slots, row))
        layer.draft(later)

    def square(self) -> Square | None:
        """Return how one call may run all positions, or None."""
        counts = self._counts
        is_wide = len(counts) * max(counts) > MOST_PADDED * sum(counts)
        if self._layer.always_masked or is_wide or not all(counts):
            return None
        is_unused = [slot[0] is None for slot in self._slots]
        return None if any(is_unused) else Square.of(counts)

    @contextmanager
    def history(self, count: int) -> Iterator[ArraysCache]:
        """Lend the states to a call of ``count`` positions; keep those after each."""
        lent = ArraysCache(len(self._slots))
        lent.cache = [slot[0] for slot in self._slots]
        lent.start_speculation(count)
        yield lent
        records: dict[int, Any] = lent._speculation["records"]
        states: list[After] = []
        for slot in range(len(self._slots)):
            states.append(After(count, *records[slot][:3]))
            self._layer[slot] = states[slot].position(0)
        slots = [Slots(states, ahead) for ahead in range(count)]
        later: dict[int, list[Source]] = {}
        for place, of in enumerate(self._counts):
            later[place] = [(after, place) for after in slots[1:of]]
        self._layer.draft(later)

    @contextmanager
    def step(self, number: int) -> Iterator[ArraysCache]:
        """Lend a step its first states; remember its last."""
        before = self.steps.each[number].before
        later: Any = self._later[number - 1] if number else self._layer
        lent = ArraysCache(len(self._slots))
        firsts = [after[min(number, len(after) - 1)] for after in self._slots]
        given = _each_used(lambda states: rows_of(states, before), firsts)
        lent.cache = list(given)
        yield lent
        for slot, (old, new) in enumerate(zip(given, lent.cache, strict=True)):
            if new is not old:  # or another module's
                self._slots[slot].append(new)
                later[slot] = new


@dataclass(frozen=True)
class After:
    """A slot's states after each position: columns of a window, or states and the last."""

    count: int
    kind: str
    states: mx.array
    last: Any  # of a window, its width

    def position(self, at: int) -> mx.array:
        if self.kind == "window":
            return self.states[:, at + 1 : at + 1 + self.last]
        return self.last if at == self.count - 1 else self.states[:, at]


@dataclass(frozen=True)
class Slots(Sequence[mx.array | None]):
    """The slots after a position."""

    states: Sequence[After]
    at: int

    def __getitem__(self, slot: Any) -> Any:
        return self.states[slot].position(self.at)

    def __len__(self) -> int:
        return len(self.states)


def _replaced(states: mx.array, slot: int, kept: Mapping[int, Source]) -> mx.array:
    """Return a slot's states (B, ...), those of some places from other arrays."""
    parts = [states[place : place + 1] for place in range(states.shape[0])]
    for place, (slots, row) in kept.items():
        array = slots[slot]
        if array is not None:
            parts[place] = array[row : row + 1]
    return joined(parts)


def _put(
    states: mx.array | None, place: int, row: mx.array | None, num_places: int
) -> mx.array | None:
    """Write a row (1, ...) to a place of states (B, ...); what is missing becomes zeros."""
    like = row if states is None else states
    if like is None:
        return None
    states = _fit(like[:0] if states is None else states, num_places)
    if row is None:
        row = mx.zeros_like(states[:1])
    return mx.concatenate([states[:place], row, states[place + 1 :]])


def _each_used(
    change: Callable[[mx.array], Any], slots: Sequence[mx.array | None]
) -> list[Any]:
    """Return what ``change`` makes of the slots that are used; None for others."""
    return [None if slot is None else change(slot) for slot in slots]


def _fit(states: mx.array, num_places: int) -> mx.array:
    if num_places <= states.shape[0]:
        return states[:num_places]
    return grown(states, (num_places, *states.shape[1:]), states.dtype, axis=0)


@filed
@dataclass(frozen=True)
class RecurrentState(LayerState):
    """States of fixed size, for one length only."""

    slots: tuple[mx.array | None, ...]
    length: int

    def reaches(self, length: int) -> bool:
        return length == self.length

    def restore(self, length: int) -> ArraysCache:
        cache = ArraysCache(len(self.slots))
        cache.cache = _each_used(lambda slot: slot[:], self.slots)
        return cache


@upstream(ArraysCache)
class RecurrentKind(UpstreamKind):
    """An ``ArraysCache``; unused slots are None."""

    cache: ArraysCache
    holds_rows = True

    def row(self, index: int, *, is_own: bool = True) -> ArraysCache:
        cut = row_of(index, is_own=is_own)
        taken = type(self.cache)(len(self.cache.cache))
        taken.cache = _each_used(cut, self.cache.cache)
        return taken

    def saved(self, length: int) -> RecurrentState:
        slots = _each_used(own_array, self.cache.cache)
        return RecurrentState(tuple(slots), length)

    def bytes_at(self, tokens: int, seen: int) -> int:
        return num_bytes(self.cache.cache)

    def batched(self, placement: Placement, num_places: int) -> LayerCache:
        return RecurrentCache()


class MaskedStates(ArraysCache):
    """States of a family whose layers mask what lies behind ``lengths`` (R,)."""


@upstream(MaskedStates)
class MaskedKind(RecurrentKind):
    can_fill = True  # type: ignore[assignment]

    def trim(self, count: int) -> None:
        """The positions were masked."""


def masked(caches: Sequence[Any]) -> list[Any]:
    """Return new caches, the states ``MaskedStates``."""
    return list(map(_masked, caches))


def _masked(cache: Any) -> Any:
    if isinstance(cache, CacheList):
        cache.caches = tuple(masked(cache.caches))
    if type(cache) is not ArraysCache:
        return cache
    return MaskedStates(len(cache.cache))


def mask_behind(caches: Sequence[Any], ends: Sequence[int]) -> None:
    """Mask what lies behind rows' ends in the states' next chunk."""
    lengths = mx.array(list(ends))
    for part in chain.from_iterable(map(parts_of, caches)):
        if isinstance(part, MaskedStates):
            part.lengths = lengths
