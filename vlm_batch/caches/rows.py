"""One layer of a batch where every row keeps its own single-row cache: one attention call per row, no padding.

Right by construction for every cache kind that mlx-vlm has for one row. On a CPU it is also the fastest (no padded
columns); on a GPU launches dominate and ``SlabCache`` is better (measured, docs/architecture.md).

Pictures of one size with one prompt are prefilled together and decode side by side. Such rows stay one array: their attention
is one call, and a token one write. A row that leaves takes the array apart: the others are copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from weakref import WeakSet

import mlx.core as mx
from mlx_vlm.models.cache import KVCache, cache_nbytes

from vlm_batch.arrays import arrays_of

#: The longest rows that are made one array: a longer one is mostly read, and to copy it is not worth it.
MOST_STACKED = 1024


@dataclass(frozen=True)
class Run:
    """Keys or values of the places [first, end), and the cache that they are in: whatever that of a row returned
    ((1, H, L, D), or a quantised tuple), None for an empty place, or (R, H, L, D) of several rows that are one array."""

    first: int
    end: int
    state: Any | None
    cache: Any | None


@dataclass(frozen=True)
class RowStates:
    """Keys or values of all places, of different lengths: what a model gets instead of one (B, H, L, D) array."""

    runs: tuple[Run, ...]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, longest L, D), for models that ask how many keys there are."""
        shapes = [run.state.shape for run in self.runs if run.state is not None]
        return (self.runs[-1].end, shapes[0][1], max(shape[2] for shape in shapes), shapes[0][3])

    def apart(self) -> list[Run]:
        """Each place by itself."""
        found: list[Run] = []
        for run in self.runs:
            rows = [run.state] if run.end - run.first == 1 or run.state is None else mx.split(run.state, len(run.state))
            found += [Run(run.first + at, run.first + at + 1, row, run.cache) for at, row in enumerate(rows)]
        return found


@dataclass(frozen=True)
class RowMasks:
    """The masks of each place; None attends to everything in the row's cache."""

    rows: tuple[mx.array | None, ...]


def attend_rows(
    attention: Callable[..., mx.array],
    queries: mx.array,
    keys: RowStates,
    values: RowStates,
    scale: float,
    mask: RowMasks | mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of (B, H, 1, D) queries over rows of different lengths: ``attention`` is called once for each live row, and
    once for rows that are one array, unless they are masked.

    An empty place answers zeros, so that the places stay aligned.
    """
    extra = {} if sinks is None else {"sinks": sinks}
    runs = (keys.runs, values.runs) if mask is None else (keys.apart(), values.apart())
    outputs: list[mx.array | None] = []  # of a row, of several, or of an empty place
    for run, other in zip(*runs, strict=True):
        if run.state is None:
            outputs.append(None)
            continue
        own: Any = mask
        if isinstance(mask, RowMasks):
            own = mask.rows[run.first]
        elif mask is not None and mask.ndim == 4 and mask.shape[0] > 1:
            own = mask[run.first : run.end]
        of_rows = queries[run.first : run.end]
        outputs.append(attention(of_rows, run.state, other.state, run.cache, scale=scale, mask=own, **extra))
    like = next((output[:1] for output in outputs if output is not None), queries[:1])  # values may be of another width
    filled = [mx.zeros_like(like) if output is None else output for output in outputs]
    return filled[0] if len(filled) == 1 else mx.concatenate(filled, axis=0)


class RowsCache:
    """One layer of the batch: ``places[b]`` is the single-row cache of the row at place b, or None.

    With ``may_stack``, for full attention, neighbours of one length that come together are made one array. One cache of them
    all stands at each of their places then.
    """

    def __init__(self, *, may_stack: bool = False) -> None:
        self.places: list[Any | None] = []
        self.may_stack = may_stack
        self.always_masked = False  # and attends over each row by itself
        self._new: WeakSet[Any] = WeakSet()  # the caches that came since the last token, while they are here
        self._offsets: tuple[tuple[int, ...], mx.array] | None = None

    def put(self, place: int, cache: Any) -> None:
        """Adopt a row's own cache; nothing is copied."""
        self.places[place] = cache
        if self.may_stack:
            self._new.add(cache)

    def take(self, place: int) -> Any:
        """The row's own cache again, with what it has seen since ``put``."""
        first, end = self._run_of(place)
        cache = self.places[place]
        return cache if end - first == 1 else one_of(cache, place - first)

    def clear(self, place: int) -> None:
        """Forget the row at a place; each other row of its array gets its own cache again."""
        first, end = self._run_of(place)
        if end - first > 1:
            self.places[first:end] = [one_of(self.places[place], index) for index in range(end - first)]
        self.places[place] = None

    def remove(self, place: int) -> None:
        """Forget the row at a place and close the gap."""
        self.clear(place)
        del self.places[place]

    def resize(self, num_places: int) -> None:
        """Keep the first places only (the others are empty)."""
        del self.places[num_places:]
        self.places.extend([None] * (num_places - len(self.places)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens that each place has seen; 0 for an empty one."""
        return tuple(0 if cache is None else int(cache.offset) for cache in self.places)

    @property
    def offset(self) -> mx.array:
        """``lengths`` as an array (B,), as models want it for RoPE."""
        lengths = self.lengths
        if self._offsets is None or self._offsets[0] != lengths:
            self._offsets = (lengths, mx.array(lengths, dtype=mx.int32))
        return self._offsets[1]

    @property
    def _idx(self) -> int:
        """The longest row; mlx-vlm reads it as the batch's shared column."""
        return max(self.lengths, default=0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowStates, RowStates]:
        """Append (B, H, 1, D) keys and values, each place's to its own row."""
        if self._new:
            if len(self._new) > 1:
                self._stack_new()
            self._new.clear()
        return self._states(lambda cache, first, end: cache.update_and_fetch(keys[first:end], values[first:end]))

    @property
    def state(self) -> tuple[RowStates, RowStates]:
        """All that the rows hold, without adding to it (cross-attention, shared KV)."""
        return self._states(lambda cache, first, end: cache.state)

    def make_mask(self, length: int, window_size: int | None = None, return_array: bool = False) -> RowMasks | None:
        """Each row's own mask for one new token, or None if no row needs one."""
        if length != 1:
            raise ValueError(f"a batch decodes one token a row, not {length}")
        masks = tuple(
            None if cache is None else cache.make_mask(1, window_size=window_size, return_array=False)
            for cache in self.places
        )
        return None if all(mask is None for mask in masks) else RowMasks(masks)

    @property
    def nbytes(self) -> int:
        return sum(cache_nbytes(cache) for _, _, cache in self._runs())

    def arrays(self) -> list[mx.array]:
        """Every array that is held, to be evaluated."""
        return arrays_of([cache.state for _, _, cache in self._runs() if cache is not None])

    def _runs(self) -> Iterator[tuple[int, int, Any]]:
        """(first place, end, cache) of each row, of rows that are one array, or of an empty place."""
        places, first = tuple(self.places), 0  # another thread may ask for the bytes while rows leave
        for end in range(1, len(places) + 1):
            cache = places[first]
            if end == len(places) or cache is None or places[end] is not cache:
                yield first, end, cache
                first = end

    def _run_of(self, place: int) -> tuple[int, int]:
        """(first place, end) of the rows that are one array with that of a place."""
        return next((first, end) for first, end, _ in self._runs() if first <= place < end)

    def _states(self, state: Callable[[Any, int, int], tuple[Any, Any]]) -> tuple[RowStates, RowStates]:
        """Keys and values of all places; ``state(cache, first, end)`` gives those of a run."""
        runs = list(self._runs())
        states = [(None, None) if cache is None else state(cache, first, end) for first, end, cache in runs]
        keys, values = (
            RowStates(
                tuple(
                    Run(first, end, held[half], cache) for (first, end, cache), held in zip(runs, states, strict=True)
                )
            )
            for half in (0, 1)
        )
        return keys, values

    def _stack_new(self) -> None:
        """Make one array of each run of neighbours that came since the last token and have one length and shape."""
        kinds = [_kind(cache) if not self.always_masked and cache in self._new else None for cache in self.places]
        for kind, run in groupby(range(len(kinds)), key=lambda place: kinds[place]):
            places = list(run)
            if kind is not None and len(places) > 1:
                first, end = places[0], places[-1] + 1
                self.places[first:end] = [_stacked(self.places[first:end])] * len(places)


def row_of(index: int, *, is_own: bool) -> Callable[[mx.array], mx.array]:
    """A function that cuts a row out of an array (R, ...), with a copy of its own or without."""
    if not is_own:
        return lambda array: array[index : index + 1]
    place = mx.array([index])
    return lambda array: mx.take(array, place, axis=0)


def one_of(stack: KVCache, index: int, *, is_own: bool = True) -> KVCache:
    """One row's cache of a cache of several rows of one length."""
    taken, cut = KVCache(), row_of(index, is_own=is_own)
    taken.keys, taken.values, taken.offset = cut(stack.keys), cut(stack.values), stack.offset
    return taken


def _kind(cache: KVCache) -> tuple[Any, ...] | None:
    """Equal for rows that can be one array; None for what cannot."""
    if cache.keys is None or cache.offset > MOST_STACKED:
        return None
    return (cache.offset, cache.keys.shape, cache.values.shape, cache.keys.dtype, cache.values.dtype)


def _stacked(rows: Sequence[Any]) -> KVCache:
    """One cache of several rows' of one length."""
    stack = KVCache()
    stack.keys = mx.concatenate([row.keys for row in rows])
    stack.values = mx.concatenate([row.values for row in rows])
    stack.offset = rows[0].offset
    return stack
