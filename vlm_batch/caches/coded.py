"""Keys and values in few bits: one row's, and slabs.

A layout codes arrays (B, H, L, D) as parts (B, H, L, ...), such as packed numbers and their scales. What follows holds for
any: ``quantized.py`` and ``turbo.py`` have the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_vlm.models.cache import create_attention_mask

from vlm_batch.arrays import num_bytes, own_array, round_up
from vlm_batch.caches.drafted import NO_LIMIT
from vlm_batch.caches.layers import CacheKind, LayerCache, Placement, row_of
from vlm_batch.caches.rows import RowsCache
from vlm_batch.caches.slab import SlabCache, columns_at, put_columns, widened
from vlm_batch.policy import KERNEL, PACKED

#: Growth of a row's cache, in columns.
STEP = 256

#: (heads, width, dtype) of a part of a slab.
PartForm = tuple[int, int, mx.Dtype]


class States(Protocol):
    """Coded keys or values in place of an array (B, H, L, D)."""

    @property
    def parts(self) -> tuple[mx.array, ...]: ...

    @property
    def layout(self) -> Any: ...

    @property
    def shape(self) -> tuple[int, int, int, int]: ...

    def map(self, change: Callable[[mx.array], mx.array]) -> Any: ...

    def between(self, begin: int, end: int) -> Any:
        """Return the positions [begin, end)."""

    def of_row(self, row: int) -> Any:
        """Return one row's, as (1, H, L, D)."""


class Layout(Protocol):
    """The code of heads of one width."""

    def code(self, array: mx.array) -> Any:
        """Code (B, H, L, D)."""

    def code_with(
        self, other: Any, keys: mx.array, values: mx.array
    ) -> tuple[Any, Any]:
        """Code keys, and values by another layout of the kind."""

    def is_stackable(self, other: Any) -> bool:
        """Whether codes of another layout of the kind can stand beside its own, as heads of one array."""

    def code_stacked(
        self, other: Any, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, ...]:
        """Return the parts of keys, and behind them of values by such a layout, as heads."""

    def states(self, parts: Sequence[mx.array]) -> Any:
        """Return states of such parts."""


class CodedCache(CacheKind):
    """One row's coded keys and values.

    A kind writes ``fresh``, ``layouts``, ``saved`` and ``slab``.
    """

    is_whole = True
    holds_rows = True

    def __init__(self) -> None:
        # (1, H, capacity, D), or several rows of one length
        self.keys: Any = None
        self.values: Any = None
        self.offset = 0

    def fresh(self) -> Any:
        """Return an empty cache of the same settings."""
        raise NotImplementedError

    def layouts(self, key_depth: int, value_depth: int) -> tuple[Layout, Layout]:
        """Return the layouts of keys and of values."""
        raise NotImplementedError

    def slab(self, num_places: int) -> LayerCache:
        """Return an empty slab of the same settings."""
        raise NotImplementedError

    def holding(self, keys: Any, values: Any, offset: int) -> Any:
        """Return a cache of the same settings with these states."""
        cache = self.fresh()
        cache.keys, cache.values, cache.offset = keys, values, offset
        return cache

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        return self.append_coded(*self.code_rows(keys, values))

    def code_rows(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        of_keys, of_values = self.layouts(keys.shape[-1], values.shape[-1])
        return of_keys.code_with(of_values, keys, values)

    def append_coded(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Append coded keys and values (1, H, L, D); return all."""
        self.keys = self._append(self.keys, keys)
        self.values = self._append(self.values, values)
        self.offset += keys.shape[2]
        return self.state

    def _append(self, held: Any, coded: Any) -> Any:
        """Write (1, H, L, D) behind the cached tokens, growing the arrays."""
        begin = self.offset
        end = begin + coded.shape[2]
        if held is None:
            return coded.map(lambda part: _joined([part]))
        if end > held.shape[2]:
            old = held.between(0, begin)
            pairs = zip(old.parts, coded.parts, strict=True)
            return coded.layout.states([_joined(list(pair)) for pair in pairs])
        for part, piece in zip(held.parts, coded.parts, strict=True):
            part[:, :, begin:end] = piece
        return held

    @property
    def state(self) -> tuple[Any, Any]:
        return self.keys.between(0, self.offset), self.values.between(0, self.offset)

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> Any:
        return create_attention_mask(
            length, self.offset, return_array=return_array, window_size=window_size
        )

    def most_positions(self, *, is_fixed: bool) -> int:
        return NO_LIMIT

    def trim(self, count: int) -> None:
        self.offset -= count

    def row(self, index: int, *, is_own: bool = True) -> Any:
        cut = row_of(index, is_own=is_own)
        return self.holding(self.keys.map(cut), self.values.map(cut), self.offset)

    @property
    def nbytes(self) -> int:
        return num_bytes((self.keys, self.values))

    def bytes_at(self, tokens: int, seen: int) -> int:
        return super().bytes_at(round_up(tokens, STEP), seen)

    def batched(self, placement: Placement, num_places: int) -> LayerCache:
        if placement is Placement.SLAB:
            return self.slab(num_places)
        return RowsCache()


def _joined(parts: list[mx.array]) -> mx.array:
    """Join columns, and zeros up to a multiple of ``STEP``."""
    last = parts[-1]
    missing = -sum(part.shape[2] for part in parts) % STEP
    if missing:
        zeros = mx.zeros((*last.shape[:2], missing, last.shape[3]), last.dtype)
        parts = [*parts, zeros]
    return last if len(parts) == 1 else mx.concatenate(parts, axis=2)


class CodedSlabCache(SlabCache):
    """Full attention as slabs of parts, each (S, H, C, ...).

    Stacking keys and values that are coded alike as heads saves operations. ``few_bits`` decides what models get for one
    layer's attention.
    """

    # parts, with the values' heads last if stacked; or None
    keys: Any
    values: Any  # parts likewise, () if stacked; or None

    def __init__(
        self, num_places: int, like: CodedCache, *, few_bits: str = PACKED
    ) -> None:
        super().__init__(num_places)
        self.few_bits = few_bits
        self._like = like  # an empty row's cache
        self._heads = (0, 0)  # of keys, of values
        self._layouts: tuple[Any, ...] = ()
        #: (heads, width, dtype) of every part of every slab.
        self._parts: list[list[PartForm]] = []

    def put(self, place: int, cache: CodedCache) -> None:
        length, states = cache.offset, cache.state
        keys, values = states
        self._layouts = (keys.layout, values.layout)
        self._heads = (keys.shape[1], values.shape[1])
        if self._is_stacked:
            self._parts = [_forms(keys, sum(self._heads))]
        else:
            self._parts = [_forms(one, one.shape[1]) for one in states]
        self._reserve_parts(length + 1)
        self._left[place] = max(self._left[place], length, self.ahead)
        for (slabs, heads), one in zip(self._halves(), states, strict=True):
            for slab, part in zip(slabs, one.parts, strict=True):
                slab[place : place + 1, heads, :length] = part
        self._wipe(place, length)
        self._lengths[place] = length

    def extract(self, place: int) -> Any:
        length = self._lengths[place]
        halves: list[Any] = []
        for (slabs, heads), layout in zip(self._halves(), self._layouts, strict=True):
            at = (slice(place, place + 1), heads, slice(length))
            halves.append(layout.states([own_array(slab[at]) for slab in slabs]))
        keys, values = halves
        return self._like.holding(keys, values, length)

    def append(self, keys: mx.array, values: mx.array) -> None:
        count = keys.shape[2]
        of_keys, of_values = self._layouts
        if self._is_stacked:
            new = [of_keys.code_stacked(of_values, keys, values), ()]
        else:
            coded = of_keys.code_with(of_values, keys, values)
            new = [states.parts for states in coded]
        self._reserve_parts(self._columns(count))
        at, self.ahead = columns_at(self._positions(), count), max(self.ahead, count)
        written: list[tuple[mx.array, ...]] = []
        for slabs, parts in zip((self.keys, self.values), new, strict=True):
            pairs = zip(slabs, parts, strict=True)
            written.append(tuple(put_columns(slab, at, part) for slab, part in pairs))
        self.keys, self.values = written

    @property
    def has_graphs_kernels(self) -> bool:
        """False for operations: a graph can fuse their scaling and masking."""
        return self.few_bits == KERNEL

    def graph_key(self) -> tuple[Any, ...]:
        self._reserve_parts(self._columns(1))
        return (tuple(part.shape for part in self.arrays()), self._mask_dtype())

    def arrays(self) -> list[mx.array]:
        return [*(self.keys or ()), *(self.values or ())]

    @property
    def _is_stacked(self) -> bool:
        keys, values = self._layouts
        return bool(keys.is_stackable(values))

    def _halves(self) -> list[tuple[Sequence[mx.array], slice]]:
        """(slabs, heads) of keys and of values."""
        if not self._is_stacked:
            return [(self.keys, slice(None)), (self.values, slice(None))]
        behind_keys = self._heads[0]
        return [
            (self.keys, slice(behind_keys)),
            (self.keys, slice(behind_keys, None)),
        ]

    def _change(self, change: Callable[[mx.array], mx.array]) -> None:
        if self.keys is not None:
            self.keys = tuple(map(change, self.keys))
            self.values = tuple(map(change, self.values))

    def _reserve_parts(self, tokens: int) -> None:
        if tokens <= self.capacity:
            return
        capacity = self._capacity(tokens)
        slabs = [self._widened(self.keys, self._parts[0], capacity), ()]
        if not self._is_stacked:
            slabs[1] = self._widened(self.values, self._parts[1], capacity)
        self.keys, self.values = slabs

    def _widened(
        self, slabs: Any, forms: Sequence[PartForm], capacity: int
    ) -> tuple[mx.array, ...]:
        found: list[mx.array] = []
        old_ones = slabs or (None,) * len(forms)
        for old, (heads, width, dtype) in zip(old_ones, forms, strict=True):
            shape = (self.num_places, heads, capacity, width)
            found.append(widened(old, shape, dtype))
        return tuple(found)


def _forms(states: States, heads: int) -> list[PartForm]:
    """Return the forms of a slab's parts with so many heads."""
    return [(heads, part.shape[3], part.dtype) for part in states.parts]
