"""Layers of a batch for one forward with drafts: a row has several positions.

The model sees each position as a row with one token. The caches append a row's positions together; each sees those
before. ``keep`` drops the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache, KVCache, RotatingKVCache

from vlm_batch.caches.indexed import IndexedCache
from vlm_batch.caches.layers import LayerCache, kind_of
from vlm_batch.caches.listed import ListedCache, parts_of
from vlm_batch.caches.quantized import QuantizedCache, QuantizedSlabCache
from vlm_batch.caches.recurrent import RecurrentCache, Source
from vlm_batch.caches.rows import RowMasks, RowsCache, RowStates, Run
from vlm_batch.caches.slab import RingSlabCache, SlabCache, lengths_array
from vlm_batch.caches.whole import WholeCache

#: No limit on drafted positions.
NO_LIMIT = 2**16
#: Most bytes of recurrent states after later positions, which are held until a forward's tokens are read.
MOST_STATE_BYTES = 2**30


def most_positions(layers: Sequence[LayerCache]) -> int:
    """Return the most positions of a row; 1 if a layer cannot drop any."""
    parts = [part for layer in layers for part in parts_of(layer)]
    states = sum(part.nbytes for part in parts if isinstance(part, RecurrentCache))
    limit = 1 + MOST_STATE_BYTES // states if states else NO_LIMIT
    return max(1, min([limit, *map(_most, parts)])) if parts else 1


def _most(part: Any) -> int:
    if type(part) is RowsCache:
        return min((_most_of_row(cache, part.always_masked) for cache in part.places if cache is not None), default=1)
    if type(part) is RingSlabCache:
        return part.window
    return NO_LIMIT if type(part) in (SlabCache, QuantizedSlabCache, RecurrentCache) else 1


def _most_of_row(cache: Any, is_fixed: bool) -> int:
    if isinstance(cache, IndexedCache):
        return _most_of_row(cache.inner, is_fixed)
    if isinstance(cache, WholeCache):
        return NO_LIMIT if cache.can_draft else 1
    if isinstance(cache, QuantizedCache):
        return NO_LIMIT
    if isinstance(cache, RotatingKVCache) and is_fixed:  # reordering a full ring changes bits
        return cache.max_size - cache.offset
    return NO_LIMIT if kind_of(cache).can_trim else 1


def with_positions(layers: Sequence[LayerCache], counts: Sequence[int]) -> list[Any]:
    """Wrap layers for ``counts[p]`` positions of place p; slabs need equal counts."""
    return [_with(layer, counts) for layer in layers]


def _with(layer: Any, counts: Sequence[int]) -> Any:
    if isinstance(layer, ListedCache):
        return ListedCache(*(_with(part, counts) for part in layer.caches))
    if isinstance(layer, RecurrentCache):
        return DraftedRecurrent(layer, counts)
    if isinstance(layer, RowsCache):
        return DraftedRows(layer, counts)
    is_overwritten = isinstance(layer, RingSlabCache) and layer.window < max(layer.lengths) + counts[0]
    return (DraftedRing if is_overwritten else DraftedSlab)(layer, counts[0])


def keep(layers: Sequence[LayerCache], place: int, count: int, kept: int) -> None:
    """Keep the first ``kept`` of a place's ``count`` positions."""
    for layer in layers:
        for part in parts_of(layer):
            if isinstance(part, (SlabCache, RecurrentCache)):
                part.keep(place, kept)
            elif count > 1:
                assert isinstance(part, RowsCache)
                cache = part.places[place]
                if isinstance(cache, WholeCache):
                    cache.keep(kept)
                elif count > kept:
                    kind_of(cache).trim(count - kept)


class DraftedRows(RowsCache):
    """A ``RowsCache`` with ``counts[p]`` positions of place p, each attending separately."""

    def __init__(self, layer: RowsCache, counts: Sequence[int]) -> None:
        super().__init__()
        layer.settle_new()
        for place, count in enumerate(counts):
            if count > 1:
                layer.separate(place)
            cache = layer.places[place]
            if count > 1 and isinstance(cache, WholeCache):
                cache.draft(count)
        self.always_masked = layer.always_masked
        self._layer, self._counts = layer, tuple(counts)
        self._ends = [0, *accumulate(counts)]
        self.places = [cache for cache, count in zip(layer.places, counts, strict=True) for _ in range(count)]
        self._before = tuple(
            length + ahead for length, count in zip(layer.lengths, counts, strict=True) for ahead in range(count)
        )
        self._appended: tuple[RowStates, RowStates] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        done = self._appended is not None
        return tuple(
            before + done * (cache is not None) for before, cache in zip(self._before, self.places, strict=True)
        )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowStates, RowStates]:
        runs: tuple[list[Run], list[Run]] = ([], [])
        for first, end, cache in self._layer.runs():
            begin, stop = self._ends[first], self._ends[end]
            if begin == stop:
                continue
            if cache is None or stop - begin == end - first:
                one: Any = (None, None)
                if cache is not None:
                    one = cache.update_and_fetch(keys[begin:stop], values[begin:stop])
                for found, state in zip(runs, one, strict=True):
                    found.append(Run(begin, stop, state, cache))
                continue
            both = cache.update_and_fetch(*(part[begin:stop].swapaxes(0, 2) for part in (keys, values)))
            for found, state in zip(runs, both, strict=True):
                if type(cache) is KVCache and not self.always_masked:
                    found.append(Run(begin, stop, state, cache))
                    continue
                found += [
                    Run(at, at + 1, seen, cache) for at, seen in enumerate(_seen(state, cache, stop - begin), begin)
                ]
        self._appended = RowStates(tuple(runs[0])), RowStates(tuple(runs[1]))
        return self._appended

    @property
    def state(self) -> tuple[RowStates, RowStates]:
        assert self._appended is not None
        return self._appended

    def make_mask(self, length: int, window_size: int | None = None, return_array: bool = False) -> RowMasks | None:
        masks: list[mx.array | None] = []
        for cache, count in zip(self._layer.places, self._counts, strict=True):
            for ahead in range(count):
                with _further(cache, ahead):
                    masks.append(
                        None if cache is None else cache.make_mask(length, window_size=window_size, return_array=False)
                    )
        return None if all(mask is None for mask in masks) else RowMasks(tuple(masks))


def _seen(states: Any, cache: Any, count: int) -> Iterator[Any]:
    """Yield what each of a row's last ``count`` positions sees."""
    window = cache.max_size if isinstance(cache, RotatingKVCache) else None
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
    cache = cache.inner if isinstance(cache, IndexedCache) else cache
    cache.offset += count
    try:
        yield
    finally:
        cache.offset -= count


@dataclass(frozen=True)
class DraftedStates:
    """A slab's keys or values (S, H, C, D) for ``count`` queries per place, shared or one each."""

    slabs: Sequence[Any]
    count: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        places, heads, columns, depth = self.slabs[0].shape
        return (places * self.count, heads, columns, depth)

    def of(self, ahead: int) -> Any:
        """Return the slab that query ``ahead`` sees."""
        return self.slabs[min(ahead, len(self.slabs) - 1)]


class DraftedSlab:
    """A slab with ``count`` positions of each place."""

    def __init__(self, layer: SlabCache, count: int) -> None:
        self._layer, self.count = layer, count
        self._is_done = False

    @property
    def lengths(self) -> tuple[int, ...]:
        ahead = range(self._is_done, self.count + self._is_done)
        return tuple((length + more) * (length > 0) for length in self._layer.lengths for more in ahead)

    @property
    def offset(self) -> mx.array:
        return lengths_array(self.lengths)

    @contextmanager
    def steps(self) -> Iterator[SlabCache]:
        """Lend the slab for single steps; ``keep`` counts their tokens."""
        before = self._layer.lengths
        try:
            yield self._layer
        finally:
            for place, (old, length) in enumerate(zip(before, self._layer.lengths, strict=True)):
                self._layer.keep(place, old - length)
            self._layer.ahead, self._is_done = max(self._layer.ahead, self.count), True

    @property
    def _idx(self) -> int:
        return max(self.lengths, default=0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[DraftedStates, DraftedStates]:
        """Append (S * count, H, 1, D) keys and values, uncounted."""
        self._layer.append(*(self._by_place(part) for part in (keys, values)))
        self._is_done = True
        return self.state

    def _by_place(self, part: mx.array) -> mx.array:  # (S * count, H, 1, D) -> (S, H, count, D)
        return part.reshape(-1, self.count, part.shape[1], part.shape[3]).swapaxes(1, 2)

    @property
    def state(self) -> tuple[DraftedStates, DraftedStates]:
        keys, values = self._layer.state
        return DraftedStates([keys], self.count), DraftedStates([values], self.count)

    def make_mask(self, length: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
        """Return the mask (S * count, 1, 1, C)."""
        if length != 1:
            raise ValueError(f"a position has one token, not {length}")
        return self._layer.seen(self.offset, self.count, window_size)


class DraftedRing(DraftedSlab):
    """A ring with a slab per position: a place's later positions overwrite what its earlier ones see."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[DraftedStates, DraftedStates]:
        new = (self._by_place(keys), self._by_place(values))
        self._layer.reserve(*new, tokens=self._layer._idx + self.count)
        with self.steps() as layer:
            slabs = [layer.update_and_fetch(*(part[:, :, at : at + 1] for part in new)) for at in range(self.count)]
        assert isinstance(layer, RingSlabCache)
        layer.hold(*slabs[0], new)
        states = (DraftedStates(half, self.count) for half in zip(*slabs, strict=True))
        self._states: tuple[DraftedStates, DraftedStates] = (next(states), next(states))
        return self._states

    @property
    def state(self) -> tuple[DraftedStates, DraftedStates]:
        return self._states


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
            places = tuple(place for place, count in enumerate(counts) if is_fixed or not ahead or count > ahead)
            rows = [min(max(0, begins[place] + min(ahead, counts[place] - 1)), last) for place in places]
            steps.append(Step(places, _index(rows), _index([there.index(place) for place in places], len(there))))
            at |= {(place, ahead): len(at) + index for index, place in enumerate(places)}
            there = places
        order = [at[place, ahead] for place, count in enumerate(counts) for ahead in range(count)]
        return cls(tuple(steps), len(order), _index(order, len(at)))


#: Everything.
ALL = slice(None)


def _index(rows: Sequence[int], size: int = -1) -> slice | mx.array:
    """Return an index of rows; ``ALL`` if they are all of ``size``."""
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    if size == len(rows) and list(rows) == list(range(size)):
        return ALL
    if step > 0 and list(rows) == list(range(rows[0], rows[-1] + 1, step)):
        return slice(rows[0], rows[-1] + 1, step)
    return mx.array(list(rows))


def rows_of(array: mx.array, index: slice | mx.array) -> mx.array:
    return array if index is ALL else array[index]


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
        self._later: list[list[mx.array | None]] = [[None] * len(self._slots) for _ in self.steps.each[1:]]
        later: dict[int, list[Source]] = {}
        for slots, step in zip(self._later, self.steps.each[1:], strict=True):
            for row, place in enumerate(step.places):
                later.setdefault(place, []).append((slots, row))
        layer.draft(later)

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


def each_position(
    attention: Callable[[mx.array, mx.array | None, Any], mx.array],
    x: mx.array,
    mask: mx.array | None,
    cache: DraftedSlab,
) -> mx.array:
    """Run attention (B, L, D) stepwise, for classes that multiply a slab's arrays."""
    count = cache.count
    with cache.steps() as layer:
        found = [
            attention(x[ahead::count], mask if mask is None else mask[ahead::count], layer) for ahead in range(count)
        ]
    return mx.stack(found, axis=1).reshape(x.shape[0], *found[0].shape[1:])


def attend_drafted(
    attention: Callable[..., mx.array],
    queries: mx.array,
    keys: DraftedStates,
    values: DraftedStates,
    cache: Any,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None,
    *,
    is_fixed: bool,
) -> mx.array:
    """Attend with queries (S * count, H, 1, D) over a slab.

    ``is_fixed``: each call has one query per place, as without drafts.
    """
    extra = {} if sinks is None else {"sinks": sinks}
    count, heads = keys.count, queries.shape[1]
    apart = queries.reshape(-1, count, heads, queries.shape[3])  # (S, count, H, D)
    shown = None if mask is None else mask.reshape(-1, count, *mask.shape[1:]) if mask.shape[0] > 1 else mask[:, None]
    is_one = len(keys.slabs) == 1 and isinstance(keys.of(0), mx.array)
    if is_one and not is_fixed and (shown is None or shown.shape[2] == 1):
        wide = None if shown is None else shown[:, :, 0].swapaxes(1, 2)  # (S, 1, count, C)
        found = attention(apart.swapaxes(1, 2), keys.of(0), values.of(0), cache, scale=scale, mask=wide, **extra)
        found = found.swapaxes(1, 2)  # (S, count, H, D_v)
    else:
        each = [
            attention(
                apart[:, ahead, :, None],
                keys.of(ahead),
                values.of(ahead),
                cache,
                scale=scale,
                mask=None if shown is None else shown[:, min(ahead, shown.shape[1] - 1)],
                **extra,
            )[:, :, 0]
            for ahead in range(count)
        ]
        found = mx.stack(each, axis=1)
    return found.reshape(-1, heads, 1, found.shape[-1])
