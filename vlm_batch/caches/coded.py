"""Keys and values in few bits: one row's, and slabs.

A layout codes arrays (B, H, L, D) as parts (B, H, L, ...), such as packed numbers and their scales. What follows holds for
any: ``quantized.py`` and ``turbo.py`` have the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx_vlm.models.cache import create_attention_mask

from vlm_batch.arrays import num_bytes, own_array, round_up
from vlm_batch.caches.drafted import NO_LIMIT
from vlm_batch.caches.layers import CacheKind, LayerCache, Placement, row_of
from vlm_batch.caches.rows import RowsCache, RowStates
from vlm_batch.caches.slab import SlabCache, columns_at, put_columns, widened
from vlm_batch.policy import KERNEL, PACKED

#: Growth of a row's cache, in columns.
STEP = 256


class PartForm(NamedTuple):
    """The form of a slab of a part."""

    heads: int
    width: int
    dtype: mx.Dtype


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

    def num_stacked(self, other: Any) -> int:
        """Return how many leading parts of keys, and of values by another layout of the kind, are heads of one array."""

    def code_stacked(
        self, other: Any, keys: mx.array, values: mx.array
    ) -> list[mx.array]:
        """Return the stacked parts, those of keys alone and those of values alone; ``halves`` takes them apart."""

    def states(self, parts: Sequence[mx.array]) -> Any:
        """Return states of such parts."""


def halves(
    parts: Sequence[mx.array], num_stacked: int, heads: int
) -> tuple[list[mx.array], list[mx.array]]:
    """Return the parts of keys, which have so many heads, and of values."""
    stacked, apart = parts[:num_stacked], parts[num_stacked:]
    middle = len(apart) // 2
    of_keys = [*(part[:, :heads] for part in stacked), *apart[:middle]]
    of_values = [*(part[:, heads:] for part in stacked), *apart[middle:]]
    return of_keys, of_values


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
        return CodedRows()


class CodedRows(RowsCache):
    """Rows' caches; all rows' keys and values are coded together, unless bits must not depend on how many they are."""

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[RowStates, RowStates]:
        if self.always_masked:
            return super().update_and_fetch(keys, values)
        of_keys, of_values = self.live[0].code_rows(keys, values)
        return self._states(
            lambda cache, place: cache.append_coded(
                of_keys.of_row(place), of_values.of_row(place)
            )
        )


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

    Parts of keys and values that look alike are heads of one slab, which saves operations. ``few_bits`` decides what models
    get for one layer's attention.
    """

    def __init__(
        self, num_places: int, like: CodedCache, *, few_bits: str = PACKED
    ) -> None:
        super().__init__(num_places)
        self.few_bits = few_bits
        #: Stacked parts, those of keys alone, and those of values alone.
        self.slabs: tuple[mx.array, ...] = ()
        self._like = like  # an empty row's cache
        self._heads = (0, 0)  # of keys, of values
        self._layouts: tuple[Any, ...] = ()
        self._forms: list[PartForm] = []  # of each slab

    def put(self, place: int, cache: CodedCache) -> None:
        length, states = cache.offset, cache.state
        keys, values = states
        self._layouts = (keys.layout, values.layout)
        self._heads = (keys.shape[1], values.shape[1])
        self._forms = self._forms_of(keys, values)
        self._reserve_slabs(length + 1)
        self._left[place] = max(self._left[place], length, self.ahead)
        for where, one in zip(self._where(), states, strict=True):
            for (at, heads), part in zip(where, one.parts, strict=True):
                self.slabs[at][place : place + 1, heads, :length] = part
        self._wipe(place, length)
        self._lengths[place] = length

    def extract(self, place: int) -> Any:
        length = self._lengths[place]
        extracted: list[Any] = []
        for where, layout in zip(self._where(), self._layouts, strict=True):
            parts = [
                own_array(self.slabs[at][place : place + 1, heads, :length])
                for at, heads in where
            ]
            extracted.append(layout.states(parts))
        keys, values = extracted
        return self._like.holding(keys, values, length)

    def append(self, keys: mx.array, values: mx.array) -> None:
        count = keys.shape[2]
        of_keys, of_values = self._layouts
        new = of_keys.code_stacked(of_values, keys, values)
        self._reserve_slabs(self._columns(count))
        at, self.ahead = columns_at(self._positions(), count), max(self.ahead, count)
        pairs = zip(self.slabs, new, strict=True)
        self.slabs = tuple(put_columns(slab, at, part) for slab, part in pairs)

    @property
    def has_graphs_kernels(self) -> bool:
        """False for operations: a graph can fuse their scaling and masking."""
        return self.few_bits == KERNEL

    def graph_key(self) -> tuple[Any, ...]:
        self._reserve_slabs(self._columns(1))
        return (tuple(part.shape for part in self.slabs), self._mask_dtype())

    def arrays(self) -> list[mx.array]:
        return list(self.slabs)

    def _num_stacked(self) -> int:
        keys, values = self._layouts
        return int(keys.num_stacked(values))

    def _where(self) -> list[list[tuple[int, slice]]]:
        """Return the slab of each part of keys, and of values, and their heads in it."""
        num_stacked, (num_keys, _) = self._num_stacked(), self._heads
        apart = range(num_stacked, len(self._forms))
        middle = len(apart) // 2
        own_heads = (slice(num_keys), slice(num_keys, None))
        own_slabs = (apart[:middle], apart[middle:])
        return [
            [(at, heads) for at in range(num_stacked)]
            + [(at, slice(None)) for at in own]
            for heads, own in zip(own_heads, own_slabs, strict=True)
        ]

    def _forms_of(self, keys: States, values: States) -> list[PartForm]:
        num_stacked, (num_keys, num_values) = self._num_stacked(), self._heads
        stacked, own = keys.parts[:num_stacked], keys.parts[num_stacked:]
        return [
            *_forms(stacked, num_keys + num_values),
            *_forms(own, num_keys),
            *_forms(values.parts[num_stacked:], num_values),
        ]

    def _hand_over(self) -> tuple[mx.array, ...]:
        slabs, self.slabs = self.slabs, ()
        return slabs

    def _hold(self, slabs: tuple[mx.array, ...]) -> None:
        self.slabs = slabs

    def _change(self, change: Callable[[mx.array], mx.array]) -> None:
        self.slabs = tuple(map(change, self.slabs))

    def _reserve_slabs(self, tokens: int) -> None:
        if tokens <= self.capacity:
            return
        capacity = self._capacity(tokens)
        widened_slabs: list[mx.array] = []
        old_ones = self.slabs or (None,) * len(self._forms)
        for old, form in zip(old_ones, self._forms, strict=True):
            shape = (self.num_places, form.heads, capacity, form.width)
            widened_slabs.append(widened(old, shape, form.dtype))
        self.slabs = tuple(widened_slabs)


def _forms(parts: Sequence[mx.array], heads: int) -> list[PartForm]:
    return [PartForm(heads, part.shape[3], part.dtype) for part in parts]
