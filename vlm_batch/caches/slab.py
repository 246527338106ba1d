"""Layers of a batch as slabs (S, H_kv, C, D) of left-aligned rows, with one attention call.

Writes use ``put_along_axis``: scatter is slower on CUDA, and ``where`` copies everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache, RotatingKVCache

from vlm_batch.arrays import grown, lengths_array, own_array, round_up
from vlm_batch.caches.drafted import NO_LIMIT, DraftedStates, Square
from vlm_batch.caches.layers import LayerCache

#: Capacities are multiples of this. Attention reads all columns of a slab, so small steps read less. But each new shape costs
#: a plan on CUDA, and each growth a copy.
CAPACITY_STEP = 256


def capacity_for(tokens: int) -> int:
    """Return the default capacity for the longest row's tokens."""
    return round_up(tokens, CAPACITY_STEP)


class SlabArrays(LayerCache):
    """Growing keys and values of all places; ``columns``: capacity by the longest row."""

    def __init__(self, num_places: int) -> None:
        self.columns: Callable[[int], int] = capacity_for
        self.keys: mx.array | None = None  # (S, H, C, D)
        self.values: mx.array | None = None  # (S, H, C, D_v)
        # columns that ended rows may have left in each place
        self._left = [0] * num_places

    @property
    def num_places(self) -> int:
        return len(self._left)

    def arrays(self) -> list[mx.array]:
        return [array for array in (self.keys, self.values) if array is not None]

    def resize(self, num_places: int) -> None:
        if num_places == self.num_places:
            return
        self._change(partial(with_places, num_places=num_places))
        self._left = (self._left + [0] * num_places)[:num_places]

    def keep_places(self, places: list[int]) -> None:
        """Keep these places, in their order, copied once."""
        at = mx.array(places)
        self._change(lambda slab: mx.take(slab, at, axis=0))
        self._left = [self._left[place] for place in places]

    def _change(self, change: Callable[[mx.array], mx.array]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = change(self.keys), change(self.values)

    @property
    def capacity(self) -> int:
        return min([int(array.shape[2]) for array in self.arrays()], default=0)

    def _capacity(self, tokens: int) -> int:
        return self.columns(tokens)

    def _row(self, slab: mx.array | None, place: int, start: int, end: int) -> mx.array:
        assert slab is not None
        return own_array(slab[place : place + 1, :, start:end])

    def _write(self, place: int, keys: mx.array, values: mx.array, offset: int) -> None:
        for slab, row in zip(self._slabs, (keys, values), strict=True):
            slab[place : place + 1, :, :offset] = row[:, :, :offset]

    @property
    def _slabs(self) -> tuple[mx.array, mx.array]:
        """Keys and values, once there are some."""
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _wipe(self, place: int, columns: int) -> None:
        """Zero a place behind ``columns``."""
        left, self._left[place] = self._left[place], 0
        for slab in self.arrays():
            end = min(left, int(slab.shape[2]))
            if columns < end:
                slab[place : place + 1, :, columns:end] = 0

    def reserve(self, keys: mx.array, values: mx.array, tokens: int) -> None:
        """Have columns for ``tokens`` of the longest row, of the widths of keys and values (., H, ., D)."""
        if tokens <= self.capacity:
            return
        capacity = self._capacity(tokens)
        self.keys = self._wide(self.keys, keys, capacity)
        self.values = self._wide(self.values, values, capacity)

    def _wide(self, slab: mx.array | None, like: mx.array, capacity: int) -> mx.array:
        shape = (self.num_places, like.shape[1], capacity, like.shape[3])
        return widened(slab, shape, like.dtype)

    def _cut(self, capacity: int) -> None:
        self._change(lambda slab: own_array(slab[:, :, :capacity]))

    def cut(self, capacity: int) -> None:
        """Keep the first columns; keys may have grown without values."""
        if any(array.shape[2] > capacity for array in self.arrays()):
            self._cut(capacity)


class SlabCache(SlabArrays):
    """Full attention; ``lengths[s]`` tokens of place s are valid, 0 if empty."""

    #: The sliding window; None for full attention.
    span: int | None = None
    has_columns = True
    most_positions = NO_LIMIT

    def __init__(self, num_places: int) -> None:
        super().__init__(num_places)
        self._lengths = [0] * num_places
        # (S,) the lengths, while a compiled step is traced
        self._traced: mx.array | None = None
        self._given = self.lengths  # before a compiled step
        self._traced_mask: mx.array | None = None
        self._traced_steps = 0
        self.ahead = 1  # most tokens appended at once, which ``lengths`` may not count

    def put(self, place: int, cache: Any) -> None:
        """Copy one row's keys and values to a place.

        Columns behind them become zeros: a masked column counts 0 times its value, and 0 times NaN is NaN.
        """
        keys, values = self._ordered(cache)
        self.reserve(keys, values, int(cache.offset) + 1)
        # even if a later line raises
        self._left[place] = max(self._left[place], int(cache.offset), self.ahead)
        self._write(place, keys, values, int(cache.offset))
        self._wipe(place, min(int(cache.offset), int(keys.shape[2])))
        self._lengths[place] = int(cache.offset)

    def extract(self, place: int) -> KVCache:
        """Return a copied row."""
        cache = KVCache()
        cache.offset = self._lengths[place]
        cache.keys, cache.values = (
            self._row(slab, place, 0, cache.offset) for slab in (self.keys, self.values)
        )
        return cache

    def clear(self, place: int) -> None:
        """Free a place; shrink the slab if half of it is unused."""
        self._left[place] = max(self._left[place], self._lengths[place] + self.ahead)
        self._lengths[place] = 0
        longest = max(self._lengths, default=0)
        if not longest:
            return
        needed = self._capacity(longest + self.ahead)
        if 2 * needed <= self.capacity:
            self._cut(needed)

    def keep_places(self, places: list[int]) -> None:
        super().keep_places(places)
        self._lengths = [self._lengths[place] for place in places]

    def resize(self, num_places: int) -> None:
        super().resize(num_places)
        self._lengths = (self._lengths + [0] * num_places)[:num_places]

    @property
    def can_trace(self) -> bool:
        return True

    @property
    def has_graphs_kernels(self) -> bool:
        return True

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    @property
    def offset(self) -> mx.array:
        """``lengths`` as an array (S,), for RoPE."""
        if self._traced is None:
            return lengths_array(self.lengths)
        return self._traced + self._traced_steps if self._traced_steps else self._traced

    @property
    def _idx(self) -> int:
        """The longest row, as mlx-vlm names it."""
        return max(self.lengths, default=0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Append (S, H, 1, D) keys and values; return the slabs."""
        self.append(keys, values)
        self._lengths = [length + (length > 0) for length in self._lengths]
        self._traced_steps += 1
        return self.state

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Write (S, H, L, D) keys and values without counting them."""
        count = keys.shape[2]
        self.reserve(keys, values, self._columns(count))
        at, self.ahead = columns_at(self._positions(), count), max(self.ahead, count)
        all_keys, all_values = self._slabs
        self.keys = put_columns(all_keys, at, keys)
        self.values = put_columns(all_values, at, values)

    def drafted(self, counts: Sequence[int]) -> DraftedSlab:
        return DraftedSlab(self, counts)

    def keep(self, place: int, kept: int, of: int = 0) -> None:
        """Add ``kept``, which may be negative, to a place's length."""
        self._lengths[place] += kept

    # A compiled step ----------------------------------------------------------------------------------------------------

    def graph_key(self) -> tuple[Any, ...]:
        """Reserve room for one token; return the key of a step's graph."""
        self.reserve(*self._slabs, self._columns(1))
        keys, _ = self._slabs
        return (keys.shape, keys.dtype)

    def step_inputs(self, *, is_added: bool) -> tuple[mx.array, mx.array]:
        """Return a graph's inputs beside the slab: lengths (S,) and the mask (S, 1, 1, C). ``is_added``: the mask is
        numbers to add to scores, which no layer may read otherwise; else bool.
        """
        mask = self.seen(self.offset, 1, None)
        if not is_added:
            return self.offset, mask
        dtype = self._mask_dtype()
        return self.offset, mx.where(
            mask, mx.array(0, dtype), mx.array(mx.finfo(dtype).min, dtype)
        )

    def _mask_dtype(self) -> mx.Dtype:
        """Return the type of numbers that masks add, which all layers' scores take."""
        floats = [
            array.dtype
            for array in self.arrays()
            if mx.issubdtype(array.dtype, mx.floating)
        ]
        return floats[0]

    def trace(self, slabs: Any, made: Sequence[mx.array]) -> None:
        """Work on placeholders for the results of ``give`` and ``step_inputs`` until the next ``give``."""
        self._hold(slabs)
        self._traced, self._traced_mask = made
        self._traced_steps = 0

    def give(self) -> tuple[Any, Any]:
        """Hand the slabs to a step, which writes them; a traced step counts no tokens."""
        if self._traced is not None:
            self._lengths = list(self._given)
            self._traced = None
            self._traced_mask = None
        self._given = self.lengths
        return self._hand_over()

    def take(self, slabs: Any, count: int) -> None:
        """Take slabs back with ``count`` (0 or 1) more tokens of every live place."""
        self._hold(slabs)
        self._lengths = [length + count * (length > 0) for length in self._lengths]

    def _hand_over(self) -> Any:
        """Return the slabs, and hold them no more, so that a step can write them in place."""
        slabs, self.keys, self.values = (self.keys, self.values), None, None
        return slabs

    def _hold(self, slabs: Any) -> None:
        self.keys, self.values = slabs

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """The last result of ``update_and_fetch``, for layers that share it."""
        return self._slabs

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | None:
        """Return the mask (S, 1, 1, C) for one token; None if all is visible."""
        if length != 1:
            raise ValueError(f"a batch decodes one token a row, not {length}")
        if self._traced_mask is not None and window_size is None:
            return self._traced_mask
        if self._is_uniform(window_size):
            return None
        return self.seen(self.offset, 1, window_size)

    def seen(self, offset: mx.array, count: int, window_size: int | None) -> mx.array:
        """Return the mask (B, 1, 1, C) of positions (B,) with ``count`` tokens appended."""
        columns = mx.arange(self._columns(count))[None, :]
        last = offset[:, None]
        mask = columns <= last
        if window_size is not None:
            mask = mask & (columns > last - window_size)
        return mask[:, None, None, :]

    def _is_uniform(self, window_size: int | None) -> bool:
        """Whether every place sees every column, outside a graph."""
        if self._traced is not None or self.always_masked or window_size is not None:
            return False
        columns = self._columns(1)
        return min(self._lengths, default=columns) + 1 >= columns

    def _columns(self, count: int) -> int:
        """Return the columns of a slab to which ``count`` tokens are appended."""
        return max(self.capacity, self._capacity(max(self._lengths, default=0) + count))

    def _ordered(self, cache: Any) -> tuple[mx.array, mx.array]:
        return cache.state

    def _positions(self) -> mx.array:
        return self.offset


class RingSlabCache(SlabCache):
    """Sliding-window attention: position p lies in column p mod window.

    Keys are stored rotated, so the ring's order does not matter.
    """

    has_graphs_kernels = False

    def __init__(self, num_places: int, window: int) -> None:
        super().__init__(num_places)
        self.window = self.span = self.most_positions = window
        #: Keys and values (S, H, L, D) of a forward with drafts that ``keep`` writes.
        self._later: tuple[mx.array, ...] = ()

    def hold(self, keys: mx.array, values: mx.array, new: Sequence[mx.array]) -> None:
        """Take the slab, with each place's first ``new`` position (S, H, L, D) only."""
        self.keys, self.values, self._later = keys, values, tuple(new)

    def append(self, keys: mx.array, values: mx.array) -> None:
        self._later = ()
        super().append(keys, values)

    def keep_places(self, places: list[int]) -> None:
        super().keep_places(places)
        self._later = tuple(
            mx.take(new, mx.array(places), axis=0) for new in self._later
        )

    def drafted(self, counts: Sequence[int]) -> DraftedSlab:
        is_overwritten = self.window < max(self.lengths) + max(counts)
        return (DraftedRing if is_overwritten else DraftedSlab)(self, counts)

    def keep(self, place: int, kept: int, of: int = 0) -> None:
        """As for a slab; also write the positions that ``hold`` left."""
        begin, end = 1, max(kept, 1) if self._later else 1
        while begin < end:
            column = (self._lengths[place] + begin) % self.window
            stop = min(end, begin + self.window - column)
            for slab, new in zip(self.arrays(), self._later, strict=True):
                slab[place : place + 1, :, column : column + stop - begin] = new[
                    place : place + 1, :, begin:stop
                ]
            begin = stop
        super().keep(place, kept)

    def extract(self, place: int) -> RotatingKVCache:
        """Return a row's last tokens, in order."""
        cache = RotatingKVCache(self.window)
        cache.offset = self._lengths[place]
        kept = min(cache.offset, self.window)
        turn = cache.offset % self.window if kept == self.window else 0
        cache.keys, cache.values = (
            mx.concatenate(
                [self._row(slab, place, turn, kept), self._row(slab, place, 0, turn)],
                axis=2,
            )
            for slab in (self.keys, self.values)
        )
        cache._idx = kept
        return cache

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | None:
        if window_size is not None and window_size < self.window:
            raise ValueError(
                f"a window of {window_size} inside a ring of {self.window} is not supported"
            )
        return super().make_mask(length)

    def seen(self, offset: mx.array, count: int, window_size: int | None) -> mx.array:
        return super().seen(offset, count, None)

    def _ordered(self, cache: Any) -> tuple[mx.array, mx.array]:
        return cache._temporal_order(cache.keys), cache._temporal_order(cache.values)

    def _positions(self) -> mx.array:
        if self._traced is not None:
            return self._traced % self.window
        return lengths_array(tuple(length % self.window for length in self._lengths))

    def _is_uniform(self, window_size: int | None) -> bool:
        if self._traced is not None or self.always_masked:
            return False
        return min(self._lengths, default=self.window) + 1 >= self.window

    def _capacity(self, tokens: int) -> int:
        return min(self.window, super()._capacity(tokens))

    def reserve(self, keys: mx.array, values: mx.array, tokens: int) -> None:
        super().reserve(keys, values, min(tokens, self.window))

    def _write(self, place: int, keys: mx.array, values: mx.array, offset: int) -> None:
        kept = min(offset, self.window, int(keys.shape[2]))
        # In temporal order, the last `kept` tokens are positions offset - kept .. offset - 1.
        begin = (offset - kept) % self.window
        first = min(kept, self.window - begin)  # the others lie at the ring's beginning
        for slab, row in zip(self._slabs, (keys, values), strict=True):
            tail = row[:, :, row.shape[2] - kept :]
            slab[place : place + 1, :, begin : begin + first] = tail[:, :, :first]
            if first < kept:
                slab[place : place + 1, :, : kept - first] = tail[:, :, first:]


class DraftedSlab:
    """A slab with ``counts[p]`` positions of place p; padding goes behind a row's length."""

    def __init__(self, layer: SlabCache, counts: Sequence[int]) -> None:
        self._layer, self.square = layer, Square.of(tuple(counts))
        self._is_done = False

    @property
    def count(self) -> int:
        return self.square.count

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(
            (length + more + self._is_done) * (length > 0)
            for length, count in zip(
                self._layer.lengths, self.square.counts, strict=True
            )
            for more in range(count)
        )

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
            for place, (old, length) in enumerate(
                zip(before, self._layer.lengths, strict=True)
            ):
                self._layer.keep(place, old - length)
            self._layer.ahead, self._is_done = max(self._layer.ahead, self.count), True

    @property
    def _idx(self) -> int:
        return max(self.lengths, default=0)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[DraftedStates, DraftedStates]:
        """Append (N, H, 1, D) keys and values, uncounted."""
        self._layer.append(*(self._by_place(part) for part in (keys, values)))
        self._is_done = True
        return self.state

    def _by_place(self, part: mx.array) -> mx.array:  # (N, H, 1, D) -> (S, H, count, D)
        return self.square.padded(part[:, :, 0]).swapaxes(1, 2)

    @property
    def state(self) -> tuple[DraftedStates, DraftedStates]:
        keys, values = self._layer.state
        return DraftedStates([keys], self.square), DraftedStates([values], self.square)

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """Return the mask (N, 1, 1, C)."""
        if length != 1:
            raise ValueError(f"a position has one token, not {length}")
        return self._layer.seen(self.offset, self.count, window_size)


class DraftedRing(DraftedSlab):
    """A ring with a slab per position: later positions overwrite what earlier ones see."""

    _layer: RingSlabCache

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[DraftedStates, DraftedStates]:
        new = (self._by_place(keys), self._by_place(values))
        self._layer.reserve(*new, tokens=self._layer._idx + self.count)
        with self.steps() as layer:
            slabs: list[tuple[mx.array, mx.array]] = [
                layer.update_and_fetch(*(part[:, :, at : at + 1] for part in new))
                for at in range(self.count)
            ]
        self._layer.hold(*slabs[0], new)
        states = (DraftedStates(half, self.square) for half in zip(*slabs, strict=True))
        self._states: tuple[DraftedStates, DraftedStates] = (next(states), next(states))
        return self._states

    @property
    def state(self) -> tuple[DraftedStates, DraftedStates]:
        return self._states


def widened(
    slab: mx.array | None, shape: tuple[int, int, int, int], dtype: mx.Dtype
) -> mx.array:
    """Add columns at once: pending copies of many layers would stay in memory."""
    wide = grown(slab, shape, dtype)
    if slab is not None:
        mx.eval(wide)
    return wide


def with_places(slab: mx.array, num_places: int) -> mx.array:
    """Cut or pad a slab (S, ...) to ``num_places``."""
    if num_places <= slab.shape[0]:
        return own_array(slab[:num_places])
    wide = grown(slab, (num_places, *slab.shape[1:]), slab.dtype, axis=0)
    mx.eval(wide)
    return wide


def columns_at(first: mx.array, count: int) -> mx.array:
    """Return ``count`` columns from each place's ``first`` on: (S, 1, L, 1)."""
    at = first[:, None, None, None]
    return (
        at if count == 1 else at + mx.arange(count, dtype=mx.int32)[None, None, :, None]
    )


def put_columns(slab: mx.array, at: mx.array, new: mx.array) -> mx.array:
    return mx.put_along_axis(slab, mx.broadcast_to(at, new.shape), new, axis=2)
