"""One layer of a batch as a slab (S, H_kv, C, D): rows lie left-aligned at their own lengths, one attention call for
all.

A join writes one row into a free place, and a leave frees it; nobody else moves. Writes go through ``put_along_axis``: a
scatter is slower on CUDA, and a ``where`` copies everything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache, RotatingKVCache

from vlm_batch.arrays import grown, own_array, round_up

#: Capacities are multiples of this. Attention reads all places and columns of a slab, those without a token masked: on CUDA
#: each new shape of it costs a plan, and each cut an operation. A capacity is the least that the longest row needs: growth
#: copies a slab once in so many tokens, and attention reads it at each of them.
CAPACITY_STEP = 256


def capacity_for(tokens: int) -> int:
    """Columns of a slab whose longest row has so many tokens, where nobody says otherwise."""
    return round_up(tokens, CAPACITY_STEP)


@lru_cache(maxsize=8)
def lengths_array(lengths: tuple[int, ...]) -> mx.array:
    """Lengths as an array (B,); made once a step, since every layer asks for the same."""
    return mx.array(lengths, dtype=mx.int32)


class SlabArrays:
    """Keys and values of all places of a layer in two arrays, grown as rows need it. ``num_places`` are there at first;
    ``columns`` gives the capacity for a longest row."""

    def __init__(self, num_places: int) -> None:
        self.columns: Callable[[int], int] = capacity_for
        self.keys: mx.array | None = None  # (S, H, C, D)
        self.values: mx.array | None = None  # (S, H, C, D_v)
        self._left = [0] * num_places  # columns in which the ended rows of an empty place may have left something

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes

    @property
    def num_places(self) -> int:
        return len(self._left)

    def arrays(self) -> list[mx.array]:
        return [array for array in (self.keys, self.values) if array is not None]

    def resize(self, num_places: int) -> None:
        """Have so many places: further ones are empty, and those past them are given up with what they hold."""
        if num_places == self.num_places:
            return
        self._fit(num_places)
        self._left = (self._left + [0] * num_places)[:num_places]

    def _fit(self, num_places: int) -> None:
        """Give the arrays so many places."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (with_places(slab, num_places) for slab in (self.keys, self.values))

    @property
    def capacity(self) -> int:
        """Columns that there is room for."""
        return min((int(array.shape[2]) for array in self.arrays()), default=0)

    def _capacity(self, tokens: int) -> int:
        return self.columns(tokens)

    def _row(self, slab: mx.array | None, place: int, start: int, end: int) -> mx.array:
        """Columns of one row (1, H, end - start, D), copied."""
        assert slab is not None
        return own_array(slab[place : place + 1, :, start:end])

    def _write(self, place: int, keys: mx.array, values: mx.array, offset: int) -> None:
        assert self.keys is not None and self.values is not None
        self.keys[place : place + 1, :, :offset] = keys[:, :, :offset]
        self.values[place : place + 1, :, :offset] = values[:, :, :offset]

    def _wipe(self, place: int, columns: int) -> None:
        """Zero what ended rows have left at a place behind its first columns."""
        left, self._left[place] = self._left[place], 0
        for slab in self.arrays():
            if columns < (end := min(left, int(slab.shape[2]))):
                slab[place : place + 1, :, columns:end] = 0

    def _reserve(self, keys: mx.array, values: mx.array, tokens: int) -> None:
        """Make room for ``tokens`` columns. Growing and giving back are the only times that a neighbour's bytes are copied."""
        if tokens <= self.capacity:
            return
        capacity = self._capacity(tokens)
        self.keys = widened(self.keys, (self.num_places, keys.shape[1], capacity, keys.shape[3]), keys.dtype)
        self.values = widened(self.values, (self.num_places, values.shape[1], capacity, values.shape[3]), values.dtype)

    def _cut(self, capacity: int) -> None:
        """Keep the first columns only, once that is computed."""
        assert self.keys is not None and self.values is not None
        self.keys, self.values = (own_array(slab[:, :, :capacity]) for slab in (self.keys, self.values))


class SlabCache(SlabArrays):
    """A layer of full attention. ``lengths[s]`` tokens of place s are valid; an empty place has length 0."""

    #: The window of a sliding layer, None for full attention.
    span: int | None = None
    #: Whether a step over it has all kernels that its graph has: none of its operations can be fused.
    has_graphs_kernels = True

    def __init__(self, num_places: int) -> None:
        super().__init__(num_places)
        self.always_masked = False
        self._lengths = [0] * num_places
        self._kept = self._lengths
        self._traced: mx.array | None = None  # (S,) the lengths, while a compiled step is traced
        self._traced_mask: mx.array | None = None
        self._traced_steps = 0  # made since then

    def put(self, place: int, cache: Any) -> None:
        """Copy one row's keys and values (its own bytes only) from its single-row cache into a place.

        What an ended row has left behind them becomes zeros: masked columns count 0 times their value, and 0 times NaN
        is NaN.
        """
        keys, values = self._ordered(cache)
        self._reserve(keys, values, int(cache.offset) + 1)
        self._left[place] = max(self._left[place], int(cache.offset))  # also if something raises on the way
        self._write(place, keys, values, int(cache.offset))
        self._wipe(place, min(int(cache.offset), int(keys.shape[2])))
        self._lengths[place] = int(cache.offset)

    def take(self, place: int) -> KVCache:
        """The row at a place as a single-row cache with arrays of its own, not evaluated yet: the inverse of ``put``."""
        cache = KVCache()
        cache.offset = self._lengths[place]
        cache.keys, cache.values = (self._row(slab, place, 0, cache.offset) for slab in (self.keys, self.values))
        return cache

    def clear(self, place: int) -> None:
        """Free a place; its bytes stay until another row is put there. Columns that no row needs are given back if they are
        half of all or more, so that rows that come and go do not make a slab narrow and wide in turns."""
        self._left[place] = max(self._left[place], self._lengths[place])
        self._lengths[place] = 0
        longest = max(self._lengths)
        if longest and 2 * (needed := self._capacity(longest + 1)) <= self.capacity:
            self._cut(needed)

    def cut(self, capacity: int) -> None:
        """Keep the first columns only, of arrays that have more: one may have grown without the other. No row has any of the
        others."""
        if any(array.shape[2] > capacity for array in self.arrays()):
            self._cut(capacity)

    def resize(self, num_places: int) -> None:
        super().resize(num_places)
        self._lengths = (self._lengths + [0] * num_places)[:num_places]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    @property
    def offset(self) -> mx.array:
        """``lengths`` as an array (S,), as models want it for RoPE."""
        if self._traced is None:
            return lengths_array(self.lengths)
        return self._traced + self._traced_steps if self._traced_steps else self._traced

    @property
    def _idx(self) -> int:
        """The longest row; mlx-vlm reads it as the batch's shared column."""
        return max(self.lengths, default=0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (S, H, 1, D) keys and values at each place's own length; returns the slabs."""
        self._reserve(keys, values, self._idx + 1)
        assert self.keys is not None and self.values is not None
        at = self._positions()[:, None, None, None]
        self.keys = put_columns(self.keys, at, keys)
        self.values = put_columns(self.values, at, values)
        self.advance()
        return self.state

    def advance(self) -> None:
        """Count the token that every live place was given."""
        self._lengths = [length + (length > 0) for length in self._lengths]
        self._traced_steps += 1

    # A compiled step: the same shapes, other lengths ---------------------------------------------------------------------

    def prepare(self) -> tuple[Any, ...]:
        """Make room for one more token; what a step's graph depends on."""
        assert self.keys is not None and self.values is not None
        self._reserve(self.keys, self.values, self._idx + 1)
        return (self.keys.shape, self.keys.dtype)

    def step_inputs(self) -> tuple[mx.array, mx.array]:
        """The inputs of a graph beside the slab: lengths (S,), and the mask (S, 1, 1, C) as numbers to be added to scores."""
        mask, dtype = self._mask(None), self._dtype
        return self.offset, mx.where(mask, mx.array(0, dtype), mx.array(mx.finfo(dtype).min, dtype))

    @property
    def _dtype(self) -> mx.Dtype:
        """The type of keys and values as attention reads them."""
        assert self.keys is not None
        return self.keys.dtype

    def give(self) -> tuple[mx.array, mx.array]:
        """Hand the slab over, to be written by a step."""
        assert self.keys is not None and self.values is not None
        given = self.keys, self.values
        self.keys = self.values = None
        return given

    def receive(self, keys: mx.array, values: mx.array) -> None:
        """Take the slab back from a step that wrote a token into every live place."""
        self.keys, self.values = keys, values
        self.advance()

    def trace(self, keys: mx.array, values: mx.array, offset: mx.array, mask: mx.array) -> None:
        """Work on placeholders for the slab and ``step_inputs`` until ``untrace``."""
        self._kept = self._lengths
        self.keys, self.values, self._traced, self._traced_mask, self._traced_steps = keys, values, offset, mask, 0

    def untrace(self) -> tuple[mx.array, mx.array]:
        """The placeholders' successors; the host's lengths are again what they were."""
        self._lengths, self._traced, self._traced_mask = self._kept, None, None
        return self.give()

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """The result of the last ``update_and_fetch`` (layers that share another layer's KV read it)."""
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def make_mask(self, length: int, window_size: int | None = None, return_array: bool = False) -> mx.array | None:
        """The keys that each place may attend to once one token is appended: (S, 1, 1, C) bool, or None if all."""
        if length != 1:
            raise ValueError(f"a batch decodes one token a row, not {length}")
        if self._traced_mask is not None and window_size is None:
            return self._traced_mask
        return None if self._is_uniform(window_size) else self._mask(window_size)

    def _mask(self, window_size: int | None) -> mx.array:
        """The columns that each place may attend to: (S, 1, 1, C) bool."""
        columns = mx.arange(self._columns)[None, :]
        last = self.offset[:, None]
        mask = columns <= last
        if window_size is not None:
            mask = mask & (columns > last - window_size)
        return mask[:, None, None, :]

    def _is_uniform(self, window_size: int | None) -> bool:
        """Whether every place sees every column, so that no mask is needed; a graph cannot know."""
        if self._traced is not None or self.always_masked:
            return False
        columns = self._columns
        return window_size is None and all(length + 1 == columns for length in self._lengths)

    @property
    def _columns(self) -> int:
        """The capacity once one token is appended."""
        return max(self.capacity, self._capacity(self._idx + 1))

    def _ordered(self, cache: Any) -> tuple[mx.array, mx.array]:
        """A row's keys and values, oldest first."""
        return cache.state

    def _positions(self) -> mx.array:
        return self.offset


class RingSlabCache(SlabCache):
    """A layer of sliding-window attention: the token at position p lies in column p mod window.

    Keys are rotated before they are stored, so their order in the ring does not matter.
    """

    has_graphs_kernels = False

    def __init__(self, num_places: int, window: int) -> None:
        super().__init__(num_places)
        self.window = self.span = window

    def take(self, place: int) -> RotatingKVCache:
        """The row's last tokens in their order."""
        cache = RotatingKVCache(self.window)
        cache.offset = self._lengths[place]
        kept = min(cache.offset, self.window)
        turn = cache.offset % self.window if kept == self.window else 0
        cache.keys, cache.values = (
            mx.concatenate([self._row(slab, place, turn, kept), self._row(slab, place, 0, turn)], axis=2)
            for slab in (self.keys, self.values)
        )
        cache._idx = kept
        return cache

    def make_mask(self, length: int, window_size: int | None = None, return_array: bool = False) -> mx.array | None:
        if window_size is not None and window_size < self.window:
            raise ValueError(f"a window of {window_size} inside a ring of {self.window} is not supported")
        return super().make_mask(length)

    def _mask(self, window_size: int | None) -> mx.array:
        columns = mx.arange(self._columns)[None, :]
        return (columns <= self.offset[:, None])[:, None, None, :]

    def _ordered(self, cache: Any) -> tuple[mx.array, mx.array]:
        return cache._temporal_order(cache.keys), cache._temporal_order(cache.values)

    def _positions(self) -> mx.array:
        if self._traced is not None:
            return self._traced % self.window
        return lengths_array(tuple(length % self.window for length in self._lengths))

    def _is_uniform(self, window_size: int | None) -> bool:
        is_known = self._traced is None and not self.always_masked
        return is_known and all(length + 1 >= self.window for length in self.lengths)

    def _capacity(self, tokens: int) -> int:
        return min(self.window, super()._capacity(tokens))

    def _reserve(self, keys: mx.array, values: mx.array, tokens: int) -> None:
        super()._reserve(keys, values, min(tokens, self.window))

    def _write(self, place: int, keys: mx.array, values: mx.array, offset: int) -> None:
        assert self.keys is not None and self.values is not None
        kept = min(offset, self.window, int(keys.shape[2]))
        # The single-row cache's last `kept` tokens in temporal order are positions offset - kept .. offset - 1.
        shift = (offset - kept) % self.window
        for slab, row in ((self.keys, keys), (self.values, values)):
            tail = row[:, :, -kept:] if kept else row[:, :, :0]
            first = min(kept, self.window - shift)
            slab[place : place + 1, :, shift : shift + first] = tail[:, :, :first]
            if first < kept:
                slab[place : place + 1, :, : kept - first] = tail[:, :, first:]


def widened(slab: mx.array | None, shape: tuple[int, int, int, int], dtype: mx.Dtype) -> mx.array:
    """A slab with more columns. One that has some is copied at once: the old ones of many layers would wait for the device
    beside the new ones."""
    wide = grown(slab, shape, dtype)
    if slab is not None:
        mx.eval(wide)
    return wide


def with_places(slab: mx.array, num_places: int) -> mx.array:
    """A slab (S, ...) with its first places, or with further ones of zeros. As ``widened``, more are made at once."""
    if num_places <= slab.shape[0]:
        return own_array(slab[:num_places])
    wide = grown(slab, (num_places, *slab.shape[1:]), slab.dtype, axis=0)
    mx.eval(wide)
    return wide


def put_columns(slab: mx.array, at: mx.array, new: mx.array) -> mx.array:
    return mx.put_along_axis(slab, mx.broadcast_to(at, new.shape), new, axis=2)
