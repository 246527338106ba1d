"""Recurrent layers: a state of fixed size per row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache, CacheList

from vlm_batch.arrays import grown, own_array
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
        # (slot, place) with zeros for an unused slot
        self._unfilled: set[tuple[int, int]] = set()

    @property
    def cache(self) -> list[Any]:
        if self._kept:
            kept, self._kept = self._kept, {}
            self._states = [
                None
                if states is None
                else _replaced(
                    states,
                    {place: (one[0][slot], one[1]) for place, one in kept.items()},
                )
                for slot, states in enumerate(self._states)
            ]
        return self._states

    @cache.setter
    def cache(self, states: list[Any]) -> None:
        self._states = states

    @property
    def state_bytes(self) -> int:  # type: ignore[override]
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

    def __setitem__(self, slot: int, states: Any) -> None:
        self._unfilled = {
            (other, place) for other, place in self._unfilled if other != slot
        }
        super().__setitem__(slot, states)

    def put(self, place: int, cache: ArraysCache) -> None:
        """Copy a row's states (1, ...) to a place; empty slots become zeros."""
        self._forget(place)
        slots = self.cache or [None] * len(cache.cache)
        self._unfilled = {
            (slot, other) for slot, other in self._unfilled if other != place
        }
        self._unfilled |= {
            (slot, place) for slot, row in enumerate(cache.cache) if row is None
        }
        self.cache = [
            _put(states, place, row, self._num_places)
            for states, row in zip(slots, cache.cache, strict=True)
        ]

    def extract(self, place: int) -> ArraysCache:
        cache = ArraysCache(len(self.cache))
        cache.cache = [
            None
            if states is None or (slot, place) in self._unfilled
            else mx.contiguous(states[place : place + 1])
            for slot, states in enumerate(self.cache)
        ]
        return cache

    def clear(self, place: int) -> None:
        """Free a place; the next row overwrites the state."""
        self._forget(place)

    def keep_places(self, places: list[int]) -> None:
        """Keep these places, in their order, copied once."""
        states, at = self.cache, mx.array(places)  # with what they keep
        now = {before: place for place, before in enumerate(places)}
        self._later = {
            now[before]: later for before, later in self._later.items() if before in now
        }
        self._unfilled = {
            (slot, now[before]) for slot, before in self._unfilled if before in now
        }
        self._num_places = len(places)
        self.cache = [
            None if one is None else mx.take(one, at, axis=0) for one in states
        ]

    def resize(self, num_places: int) -> None:
        for place in range(num_places, self._num_places):
            self._forget(place)
        self._num_places = num_places
        self.cache = [
            None if states is None else _fit(states, num_places)
            for states in self.cache
        ]

    @property
    def nbytes(self) -> int:
        # another thread may ask
        return sum(states.nbytes for states in self._states if states is not None)

    def arrays(self) -> list[mx.array]:
        return [states for states in self.cache if states is not None]

    # A compiled step ----------------------------------------------------------------------------------------------------

    def graph_key(self) -> tuple[Any, ...]:
        return tuple(
            None if states is None else (states.shape, states.dtype)
            for states in self.cache
        )

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
        self.cache = [one[0] if one else None for one in slots]
        self._unfilled = {
            (slot, place)
            for slot, place in self._unfilled
            if not (count and slots[slot])
        }


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
        begins = [0, *accumulate(counts)]
        last, steps, at = begins[-1] - 1, list[Step](), dict[tuple[int, int], int]()
        there: tuple[int, ...] = tuple(range(len(counts)))
        for ahead in range(max(counts)):
            places = tuple(
                place
                for place, count in enumerate(counts)
                if is_fixed or not ahead or count > ahead
            )
            rows = [
                min(max(0, begins[place] + min(ahead, counts[place] - 1)), last)
                for place in places
            ]
            steps.append(
                Step(
                    places,
                    index_of(rows),
                    index_of([there.index(place) for place in places], len(there)),
                )
            )
            at |= {
                (place, ahead): len(at) + index for index, place in enumerate(places)
            }
            there = places
        order = [
            at[place, ahead]
            for place, count in enumerate(counts)
            for ahead in range(count)
        ]
        return cls(tuple(steps), len(order), index_of(order, len(at)))


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
        wide = (
            len(self._counts) * max(self._counts) <= MOST_PADDED * sum(self._counts)
            and min(self._counts) > 0
        )
        if (
            self._layer.always_masked
            or not wide
            or any(slot[0] is None for slot in self._slots)
        ):
            return None
        return Square.of(self._counts)

    @contextmanager
    def history(self, count: int) -> Iterator[ArraysCache]:
        """Lend the states to a call of ``count`` positions; keep those after each."""
        lent = ArraysCache(len(self._slots))
        lent.cache = [slot[0] for slot in self._slots]
        lent.start_speculation(count)
        yield lent
        records: dict[int, Any] = lent._speculation["records"]
        states = [After(count, *records[slot][:3]) for slot in range(len(self._slots))]
        for slot, one in enumerate(states):
            self._layer[slot] = one.position(0)
        later: dict[int, list[Source]] = {
            place: [(Slots(states, ahead), place) for ahead in range(1, of)]
            for place, of in enumerate(self._counts)
        }
        self._layer.draft(later)

    @contextmanager
    def step(self, number: int) -> Iterator[ArraysCache]:
        """Lend a step its first states; remember its last."""
        before = self.steps.each[number].before
        held = [slot[min(number, len(slot) - 1)] for slot in self._slots]
        given = [None if states is None else rows_of(states, before) for states in held]
        lent = ArraysCache(len(given))
        lent.cache = list(given)
        yield lent
        for slot, (old, new) in enumerate(zip(given, lent.cache, strict=True)):
            if new is old:  # another module's
                continue
            self._slots[slot].append(new)
            if number:
                self._later[number - 1][slot] = new
            else:
                self._layer[slot] = new


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


def _replaced(
    states: mx.array, kept: Mapping[int, tuple[mx.array | None, int]]
) -> mx.array:
    """Return states (B, ...), some places from other arrays' rows."""
    parts: list[mx.array] = []
    for place in range(states.shape[0]):
        array, row = kept.get(place, (None, 0))
        parts.append(
            states[place : place + 1] if array is None else array[row : row + 1]
        )
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _put(
    states: mx.array | None, place: int, row: mx.array | None, num_places: int
) -> mx.array | None:
    if states is None and row is None:
        return None
    if row is None:
        assert states is not None
        row = mx.zeros((1, *states.shape[1:]), states.dtype)
    states = _fit(row[:0] if states is None else states, num_places)
    return mx.concatenate([states[:place], row, states[place + 1 :]])


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
        cache.cache = [None if slot is None else slot[:] for slot in self.slots]
        return cache


@upstream(ArraysCache)
class RecurrentKind(UpstreamKind):
    """An ``ArraysCache``; unused slots are None."""

    cache: ArraysCache
    holds_rows = True

    def row(self, index: int, *, is_own: bool = True) -> ArraysCache:
        cut = row_of(index, is_own=is_own)
        taken = type(self.cache)(len(self.cache.cache))
        taken.cache = [None if slot is None else cut(slot) for slot in self.cache.cache]
        return taken

    def saved(self, length: int) -> RecurrentState:
        return RecurrentState(
            tuple(
                None if slot is None else own_array(slot) for slot in self.cache.cache
            ),
            length,
        )

    def bytes_at(self, tokens: int, seen: int) -> int:
        return sum(slot.nbytes for slot in self.cache.cache if slot is not None)

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
    found: list[Any] = []
    for cache in caches:
        if isinstance(cache, CacheList):
            cache.caches = tuple(masked(cache.caches))
        found.append(
            MaskedStates(len(cache.cache)) if type(cache) is ArraysCache else cache
        )
    return found


def mask_behind(caches: Sequence[Any], ends: Sequence[int]) -> None:
    """Mask what lies behind rows' ends in the states' next chunk."""
    lengths = mx.array(list(ends))
    for cache in caches:
        for part in parts_of(cache):
            if isinstance(part, MaskedStates):
                part.lengths = lengths
