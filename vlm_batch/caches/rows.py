"""Layers whose rows keep single-row caches, with one attention call per row.

Fastest on a CPU; on a GPU launches dominate (docs/architecture.md). Short rows of one length that join together share
an array until one leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any
from weakref import WeakSet

import mlx.core as mx
from mlx_vlm.models.cache import KVCache, cache_nbytes

from vlm_batch.arrays import arrays_of, lengths_array
from vlm_batch.caches.layers import LayerCache, kind_of

#: The longest rows worth copying into one array.
MOST_STACKED = 1024


@dataclass(frozen=True)
class Run:
    """Keys or values of the places [first, end), and their cache.

    ``state`` is one row's (1, H, L, D) or quantised states, stacked rows (R, H, L, D), or None for one empty place. One
    row's at several places are later positions; the last sees all.
    """

    first: int
    end: int
    state: Any | None
    cache: Any | None

    @property
    def is_ahead(self) -> bool:
        """Whether the places are positions of one row."""
        return (
            isinstance(self.state, mx.array) and len(self.state) < self.end - self.first
        )

    def apart(self) -> list[Run]:
        """Return a run for each place."""
        count = self.end - self.first
        whole: Any = self.state
        if self.is_ahead:
            length = whole.shape[2] - count + 1
            states = [whole[:, :, : length + at] for at in range(count)]
        else:
            states = (
                [whole]
                if count == 1 or whole is None
                else list(mx.split(whole, len(whole)))
            )
        return [
            Run(self.first + at, self.first + at + 1, state, self.cache)
            for at, state in enumerate(states)
        ]


@dataclass(frozen=True)
class RowStates:
    """Keys or values of rows of different lengths, in an array's place."""

    runs: tuple[Run, ...]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, longest L, D)"""
        shapes = [run.state.shape for run in self.runs if run.state is not None]
        return (
            self.runs[-1].end,
            shapes[0][1],
            max(shape[2] for shape in shapes),
            shapes[0][3],
        )

    def apart(self) -> list[Run]:
        """Return a run for each place."""
        return [one for run in self.runs for one in run.apart()]


@dataclass(frozen=True)
class RowMasks:
    """Each place's mask; None attends to the whole cache."""

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
    """Attend with queries (B, H, 1, D), one call per row, its unmasked positions or unmasked stack.

    Empty places give zeros.
    """
    extra = {} if sinks is None else {"sinks": sinks}
    runs = (keys.runs, values.runs) if mask is None else (keys.apart(), values.apart())
    outputs: list[mx.array | None] = []  # per run
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
        if run.is_ahead:
            count, length = run.end - run.first, run.state.shape[2]
            own = mx.arange(length) <= mx.arange(length - count, length)[:, None]
            of_rows = of_rows.swapaxes(0, 2)
        found = attention(
            of_rows, run.state, other.state, run.cache, scale=scale, mask=own, **extra
        )
        outputs.append(found.swapaxes(0, 2) if run.is_ahead else found)
    # values may have another width
    like = next((output[:1] for output in outputs if output is not None), queries[:1])
    filled = [mx.zeros_like(like) if output is None else output for output in outputs]
    return filled[0] if len(filled) == 1 else mx.concatenate(filled, axis=0)


class RowsCache(LayerCache):
    """One layer of a batch; ``places[b]``: the cache of place b, or None.

    ``may_stack``: neighbours of one length that join together share a cache.
    """

    def __init__(self, *, may_stack: bool = False) -> None:
        self.places: list[Any | None] = []
        self.may_stack = may_stack
        self._new: WeakSet[Any] = WeakSet()  # caches put since the last token

    def put(self, place: int, cache: Any) -> None:
        """Adopt a row's cache without a copy."""
        self.places[place] = cache
        if self.may_stack:
            self._new.add(cache)

    def extract(self, place: int) -> Any:
        first, end = self._run_of(place)  # of its stack
        cache = self.places[place]
        return cache if end - first == 1 else one_of(cache, place - first)

    def clear(self, place: int) -> None:
        self.separate(place)
        self.places[place] = None

    def keep_places(self, places: list[int]) -> None:
        """Keep these places, in their order."""
        self.places = [self.places[place] for place in places]

    def resize(self, num_places: int) -> None:
        del self.places[num_places:]
        self.places.extend([None] * (num_places - len(self.places)))

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(0 if cache is None else int(cache.offset) for cache in self.places)

    @property
    def offset(self) -> mx.array:
        """``lengths`` as an array (B,), for RoPE."""
        return lengths_array(self.lengths)

    @property
    def _idx(self) -> int:
        """The longest row, as mlx-vlm names it."""
        return max(self.lengths, default=0)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[RowStates, RowStates]:
        self.settle_new()
        return self._states(
            lambda cache, first, end: cache.update_and_fetch(
                keys[first:end], values[first:end]
            )
        )

    def settle_new(self) -> None:
        """Stack neighbours of one length that were put since the last token."""
        if len(self._new) > 1 and not self.always_masked:
            kinds = [
                _kind(cache) if cache in self._new else None for cache in self.places
            ]
            for kind, run in groupby(range(len(kinds)), key=lambda place: kinds[place]):
                places = list(run)
                if kind is not None and len(places) > 1:
                    first, end = places[0], places[-1] + 1
                    self.places[first:end] = [_stacked(self.places[first:end])] * len(
                        places
                    )
        self._new.clear()

    def separate(self, place: int) -> None:
        """Unstack the row at a place."""
        first, end = self._run_of(place)
        if end - first > 1:
            self.places[first:end] = [
                one_of(self.places[place], index) for index in range(end - first)
            ]

    @property
    def state(self) -> tuple[RowStates, RowStates]:
        """All keys and values, for layers that share them."""
        return self._states(lambda cache, first, end: cache.state)

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> RowMasks | None:
        """Return the rows' masks for one token; None if no row needs one."""
        if length != 1:
            raise ValueError(f"a batch decodes one token a row, not {length}")
        masks = tuple(
            None
            if cache is None
            else cache.make_mask(1, window_size=window_size, return_array=False)
            for cache in self.places
        )
        return None if all(mask is None for mask in masks) else RowMasks(masks)

    @property
    def nbytes(self) -> int:
        return sum(cache_nbytes(cache) for _, _, cache in self.runs())

    def arrays(self) -> list[mx.array]:
        return arrays_of(
            [cache.state for _, _, cache in self.runs() if cache is not None]
        )

    def runs(self) -> Iterator[tuple[int, int, Any]]:
        """Yield each row's, stack's or empty place's (first, end, cache)."""
        # another thread may read while rows leave
        places, first = tuple(self.places), 0
        for end in range(1, len(places) + 1):
            cache = places[first]
            if end == len(places) or cache is None or places[end] is not cache:
                yield first, end, cache
                first = end

    @property
    def most_positions(self) -> int:  # type: ignore[override]
        held = [kind_of(cache) for _, _, cache in self.runs() if cache is not None]
        return min(
            (kind.most_positions(is_fixed=self.always_masked) for kind in held),
            default=1,
        )

    def drafted(self, counts: Sequence[int]) -> DraftedRows:
        return DraftedRows(self, counts)

    def keep(self, place: int, kept: int, of: int) -> None:
        if of > 1:
            kind_of(self.places[place]).keep(kept, of)

    def _run_of(self, place: int) -> tuple[int, int]:
        return next(
            (first, end) for first, end, _ in self.runs() if first <= place < end
        )

    def _states(
        self, state: Callable[[Any, int, int], tuple[Any, Any]]
    ) -> tuple[RowStates, RowStates]:
        runs = list(self.runs())
        states = [
            (None, None) if cache is None else state(cache, first, end)
            for first, end, cache in runs
        ]
        keys, values = (
            RowStates(
                tuple(
                    Run(first, end, held[half], cache)
                    for (first, end, cache), held in zip(runs, states, strict=True)
                )
            )
            for half in (0, 1)
        )
        return keys, values


class DraftedRows(RowsCache):
    """A ``RowsCache`` with ``counts[p]`` positions of place p, each attending separately."""

    def __init__(self, layer: RowsCache, counts: Sequence[int]) -> None:
        super().__init__()
        layer.settle_new()
        for place, count in enumerate(counts):
            if count > 1:
                layer.separate(place)
                kind_of(layer.places[place]).draft(count)
        self.always_masked = layer.always_masked
        self._layer, self._counts = layer, tuple(counts)
        self._ends = [0, *accumulate(counts)]
        self.places = [
            cache
            for cache, count in zip(layer.places, counts, strict=True)
            for _ in range(count)
        ]
        self._before = tuple(
            length + ahead
            for length, count in zip(layer.lengths, counts, strict=True)
            for ahead in range(count)
        )
        self._appended: tuple[RowStates, RowStates] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        done = self._appended is not None
        return tuple(
            before + done * (cache is not None)
            for before, cache in zip(self._before, self.places, strict=True)
        )

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[RowStates, RowStates]:
        runs: tuple[list[Run], list[Run]] = ([], [])
        for first, end, cache in self._layer.runs():
            begin, stop = self._ends[first], self._ends[end]
            # it may have any number of positions, and each is a place by itself
            if cache is None:
                for found in runs:
                    found += [Run(at, at + 1, None, None) for at in range(begin, stop)]
                continue
            if begin == stop:
                continue
            if stop - begin == end - first:
                one = cache.update_and_fetch(keys[begin:stop], values[begin:stop])
                for found, state in zip(runs, one, strict=True):
                    found.append(Run(begin, stop, state, cache))
                continue
            both = cache.update_and_fetch(
                *(part[begin:stop].swapaxes(0, 2) for part in (keys, values))
            )
            for found, state in zip(runs, both, strict=True):
                if type(cache) is KVCache and not self.always_masked:
                    found.append(Run(begin, stop, state, cache))
                    continue
                found += [
                    Run(at, at + 1, seen, cache)
                    for at, seen in enumerate(_seen(state, cache, stop - begin), begin)
                ]
        self._appended = RowStates(tuple(runs[0])), RowStates(tuple(runs[1]))
        return self._appended

    @property
    def state(self) -> tuple[RowStates, RowStates]:
        assert self._appended is not None
        return self._appended

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> RowMasks | None:
        masks: list[mx.array | None] = []
        for cache, count in zip(self._layer.places, self._counts, strict=True):
            for ahead in range(count):
                with _further(cache, ahead):
                    masks.append(
                        None
                        if cache is None
                        else cache.make_mask(
                            length, window_size=window_size, return_array=False
                        )
                    )
        return None if all(mask is None for mask in masks) else RowMasks(tuple(masks))


def _seen(states: Any, cache: Any, count: int) -> Iterator[Any]:
    """Yield what each of a row's last ``count`` positions sees."""
    window = kind_of(cache).span
    length = states.shape[2]
    for end in range(length - count + 1, length + 1):
        begin = 0 if window is None else max(0, end - window)

        def cut(part: mx.array, begin: int = begin, end: int = end) -> mx.array:
            return part[:, :, begin:end]

        yield cut(states) if isinstance(states, mx.array) else states.map(cut)


@contextmanager
def _further(cache: Any, count: int) -> Iterator[None]:
    if cache is None or not count:
        yield
        return
    counter = kind_of(cache).counter
    counter.offset += count
    try:
        yield
    finally:
        counter.offset -= count


def row_of(index: int, *, is_own: bool) -> Callable[[mx.array], mx.array]:
    """Return a function that selects a row of (R, ...); ``is_own`` copies it."""
    if not is_own:
        return lambda array: array[index : index + 1]
    place = mx.array([index])
    return lambda array: mx.take(array, place, axis=0)


def one_of(stack: KVCache, index: int, *, is_own: bool = True) -> KVCache:
    """Return one row's cache in a stack."""
    taken, cut = KVCache(), row_of(index, is_own=is_own)
    taken.keys, taken.values, taken.offset = (
        cut(stack.keys),
        cut(stack.values),
        stack.offset,
    )
    return taken


def _kind(cache: KVCache) -> tuple[Any, ...] | None:
    """Return a key that stackable rows share, or None."""
    if cache.keys is None or cache.offset > MOST_STACKED:
        return None
    return (
        cache.offset,
        cache.keys.shape,
        cache.values.shape,
        cache.keys.dtype,
        cache.values.dtype,
    )


def _stacked(rows: Sequence[Any]) -> KVCache:
    stack = KVCache()
    stack.keys = mx.concatenate([row.keys for row in rows])
    stack.values = mx.concatenate([row.values for row in rows])
    stack.offset = rows[0].offset
    return stack
