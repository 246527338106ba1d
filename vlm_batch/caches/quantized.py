"""Keys and values quantised by ``mx.quantize``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_vlm.models.cache import create_attention_mask

from vlm_batch.arrays import own_array, round_up
from vlm_batch.caches.drafted import NO_LIMIT
from vlm_batch.caches.layers import CacheKind, LayerCache, Placement, row_of
from vlm_batch.caches.rows import RowsCache
from vlm_batch.caches.slab import SlabCache, columns_at, put_columns, widened
from vlm_batch.caches.states import LayerState, filed
from vlm_batch.policy import KERNEL, PACKED, UNPACKED
from vlm_batch.runtime.device import Device, device

#: Growth of a row's cache, in columns.
STEP = 256


class Layout(NamedTuple):
    """Layout of numbers in heads of ``depth``, padded to whole groups."""

    group_size: int
    bits: int
    depth: int


class QuantizedStates(NamedTuple):
    """Quantised keys or values (B, H, L, D) in place of an array."""

    packed: mx.array  # (B, H, L, D * bits / 32) uint32
    scales: mx.array  # (B, H, L, D / group_size)
    biases: mx.array
    layout: Layout

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, length, _ = self.scales.shape
        return (batch, heads, length, self.layout.depth)

    @property
    def parts(self) -> tuple[mx.array, mx.array, mx.array]:
        return (self.packed, self.scales, self.biases)

    def between(self, begin: int, end: int) -> QuantizedStates:
        """Return the positions [begin, end)."""
        return of_parts([part[:, :, begin:end] for part in self.parts], self.layout)

    def map(self, change: Any) -> QuantizedStates:
        return of_parts([change(part) for part in self.parts], self.layout)

    def dequantized(self) -> mx.array:
        packed, scales, biases = (mx.contiguous(part) for part in self.parts)
        group_size, bits, depth = self.layout
        return mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits)[
            ..., :depth
        ]


class SlabStates(NamedTuple):
    """Heads of quantised slabs from ``first``, for a kernel that reads slabs."""

    packed: mx.array  # (S, heads of the slab, C, D * bits / 32) uint32
    scales: mx.array
    biases: mx.array
    layout: Layout
    first: int  # head
    heads: int

    @property
    def columns(self) -> int:
        return int(self.packed.shape[2])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.packed.shape[0], self.heads, self.columns, self.layout.depth)

    @property
    def parts(self) -> tuple[mx.array, mx.array, mx.array]:
        return (self.packed, self.scales, self.biases)

    def cut(self) -> QuantizedStates:
        return of_parts(
            [part[:, self.first : self.first + self.heads] for part in self.parts],
            self.layout,
        )


def of_slab(
    parts: Sequence[mx.array], layout: Layout, first: int, heads: int
) -> SlabStates:
    packed, scales, biases = parts
    return SlabStates(packed, scales, biases, layout, first, heads)


def unpacked(keys: SlabStates, values: SlabStates) -> tuple[mx.array, mx.array]:
    """Dequantise keys and values (S, H, C, D), together if they share slabs."""
    if keys.packed is not values.packed:
        return keys.cut().dequantized(), values.cut().dequantized()
    both = of_parts(keys.parts, keys.layout).dequantized()
    found_k, found_v = (
        both[:, one.first : one.first + one.heads] for one in (keys, values)
    )
    return found_k, found_v


def of_parts(parts: Sequence[mx.array], layout: Layout) -> QuantizedStates:
    packed, scales, biases = parts
    return QuantizedStates(packed, scales, biases, layout)


def quantize(array: mx.array, group_size: int, bits: int) -> QuantizedStates:
    """Quantise (B, H, L, D) along D."""
    layout = Layout(group_size, bits, array.shape[-1])
    return of_parts(
        mx.quantize(_filled(array, group_size), group_size=group_size, bits=bits),
        layout,
    )


def _filled(array: mx.array, group_size: int) -> mx.array:
    missing = -array.shape[-1] % group_size
    return (
        mx.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])
        if missing
        else array
    )


class QuantizedCache(CacheKind):
    """One row's quantised keys and values."""

    is_whole = True
    holds_rows = True

    def __init__(self, group_size: int, bits: int) -> None:
        self.group_size = group_size
        self.bits = bits
        # (1, H, capacity, D), or several rows of one length
        self.keys: QuantizedStates | None = None
        self.values: QuantizedStates | None = None
        self.offset = 0

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[QuantizedStates, QuantizedStates]:
        end = self.offset + keys.shape[2]
        self.keys, self.values = (
            _append(held, quantize(new, self.group_size, self.bits), self.offset)
            for held, new in ((self.keys, keys), (self.values, values))
        )
        self.offset = end
        return self.state

    @property
    def state(self) -> tuple[QuantizedStates, QuantizedStates]:
        assert self.keys is not None and self.values is not None
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

    def row(self, index: int, *, is_own: bool = True) -> QuantizedCache:
        taken = QuantizedCache(self.group_size, self.bits)
        cut = row_of(index, is_own=is_own)
        assert self.keys is not None and self.values is not None
        taken.keys, taken.values = self.keys.map(cut), self.values.map(cut)
        taken.offset = self.offset
        return taken

    @property
    def nbytes(self) -> int:
        return sum(
            part.nbytes
            for held in (self.keys, self.values)
            if held is not None
            for part in held.parts
        )

    def bytes_at(self, tokens: int, seen: int) -> int:
        return super().bytes_at(round_up(tokens, STEP), seen)

    def saved(self, length: int) -> QuantizedState:
        keys, values = (
            tuple(own_array(part) for part in states.parts) for states in self.state
        )
        depths = tuple(states.layout.depth for states in self.state)
        return QuantizedState(
            keys, values, self.group_size, self.bits, (depths[0], depths[1])
        )

    def batched(self, placement: Placement, num_places: int) -> LayerCache:
        if placement is Placement.SLAB:
            return QuantizedSlabCache(num_places, self.group_size, self.bits)
        return RowsCache()


@filed
@dataclass(frozen=True)
class QuantizedState(LayerState):
    """Packed numbers, scales and biases (1, H, L, ...) of keys and of values."""

    keys: tuple[mx.array, ...]
    values: tuple[mx.array, ...]
    group_size: int
    bits: int
    depths: tuple[int, int]  # head widths of keys and values
    is_whole = True

    def reaches(self, length: int) -> bool:
        return length <= int(self.keys[0].shape[2])

    def restore(self, length: int) -> QuantizedCache:
        cache = QuantizedCache(self.group_size, self.bits)
        cache.keys, cache.values = (
            of_parts(
                [part[:, :, :length] for part in parts],
                Layout(self.group_size, self.bits, depth),
            )
            for parts, depth in zip((self.keys, self.values), self.depths, strict=True)
        )
        cache.offset = length
        return cache


def attend_quantized(
    queries: mx.array,
    keys: QuantizedStates,
    values: QuantizedStates,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend with queries (B, H, L, D) over quantised keys and values.

    ``mask``: None, "causal", or an array for (B, H, L, K), bool (True attends) or additive.
    """
    batch, heads, length, _ = queries.shape
    if length > 1:
        plain = (states.dequantized() for states in (keys, values))
        return mx.fast.scaled_dot_product_attention(
            queries, *plain, scale=scale, mask=mask, sinks=sinks
        )
    groups = keys.shape[1]
    group_size, bits, _ = keys.layout
    product = partial(mx.quantized_matmul, group_size=group_size, bits=bits)
    # MLX 0.32 has no product of strided columns (supports_qmm_naive)
    if device() is Device.CUDA:
        keys, values = (states.map(mx.contiguous) for states in (keys, values))
    # heads that share keys become rows
    grouped = _filled(queries * scale, group_size).reshape(
        batch, groups, heads // groups, -1
    )
    scores = product(grouped, *keys.parts, transpose=True)  # (B, G, H / G, K)
    if isinstance(mask, mx.array):  # "causal" hides nothing from the last query
        by_group = _by_group(mask, groups, heads)
        scores = (
            mx.where(by_group, scores, -mx.inf)
            if mask.dtype == mx.bool_
            else scores + by_group
        )
    if sinks is not None:
        column = mx.broadcast_to(
            sinks.reshape(1, groups, heads // groups, 1), (*scores.shape[:3], 1)
        )
        scores = mx.concatenate([scores, column.astype(scores.dtype)], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    if sinks is not None:
        weights = weights[..., :-1]
    output = product(weights, *values.parts, transpose=False)  # (B, G, H / G, D_v)
    return output[..., : values.layout.depth].reshape(batch, heads, 1, -1)


def _by_group(mask: mx.array, groups: int, heads: int) -> mx.array:
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if mask.shape[1] == 1:
        return mask
    return mask.reshape(mask.shape[0], groups, heads // groups, mask.shape[3])


def _append(
    held: QuantizedStates | None, new: QuantizedStates, at: int
) -> QuantizedStates:
    """Write ``new`` behind ``at`` columns, growing the array."""
    end = at + new.shape[2]
    if held is None or end > held.packed.shape[2]:
        pairs = zip((None,) * 3 if held is None else held.parts, new.parts, strict=True)
        return of_parts([_joined(old, piece, at) for old, piece in pairs], new.layout)
    for part, piece in zip(held.parts, new.parts, strict=True):
        part[:, :, at:end] = piece
    return held


def _joined(old: mx.array | None, new: mx.array, at: int) -> mx.array:
    """Join ``at`` columns of ``old``, ``new`` and zeros up to ``STEP``."""
    parts = [new] if old is None or not at else [old[:, :, :at], new]
    if missing := -(at + new.shape[2]) % STEP:
        parts.append(mx.zeros((*new.shape[:2], missing, new.shape[3]), new.dtype))
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else new


class QuantizedSlabCache(SlabCache):
    """Full attention as quantised slabs: packed numbers, scales, biases, each (S, H, C, ...).

    Stacking keys and values of one depth as heads saves operations. ``few_bits`` decides if models get QuantizedStates,
    SlabStates or arrays, which live for one layer's attention.
    """

    # parts of QuantizedStates, with the values' heads last if stacked; or None
    keys: Any
    values: Any  # parts likewise, () if stacked; or None

    def __init__(
        self, num_places: int, group_size: int, bits: int, *, few_bits: str = PACKED
    ) -> None:
        super().__init__(num_places)
        self.few_bits = few_bits
        self._group_size = group_size
        # not ``bits``, by which mlx-vlm recognises caches that return packed numbers
        self._num_bits = bits
        self._heads = (0, 0)  # of keys, of values
        self._layouts: list[Layout] = []
        #: (heads, width, dtype) of every part of every slab.
        self._parts: list[list[tuple[int, int, mx.Dtype]]] = []

    def put(self, place: int, cache: QuantizedCache) -> None:
        length, states = cache.offset, cache.state
        self._layouts = [one.layout for one in states]
        self._heads = (states[0].shape[1], states[1].shape[1])
        self._parts = [
            [(one.shape[1], part.shape[3], part.dtype) for part in one.parts]
            for one in states
        ]
        if self._is_stacked:
            self._parts = [
                [(sum(self._heads), width, dtype) for _, width, dtype in self._parts[0]]
            ]
        self._reserve_parts(length + 1)
        self._left[place] = max(self._left[place], length, self.ahead)
        for (slabs, heads), one in zip(self._halves(), states, strict=True):
            for slab, part in zip(slabs, one.parts, strict=True):
                slab[place : place + 1, heads, :length] = part
        self._wipe(place, length)
        self._lengths[place] = length

    def extract(self, place: int) -> Any:
        cache = QuantizedCache(self._group_size, self._num_bits)
        cache.offset = self._lengths[place]
        cache.keys, cache.values = (
            of_parts(
                [
                    own_array(slab[place : place + 1, heads, : cache.offset])
                    for slab in slabs
                ],
                layout,
            )
            for (slabs, heads), layout in zip(
                self._halves(), self._layouts, strict=True
            )
        )
        return cache

    def append(self, keys: mx.array, values: mx.array) -> None:
        stacks = (
            [mx.concatenate([keys, values], axis=1)]
            if self._is_stacked
            else [keys, values]
        )
        count = keys.shape[2]
        new = [
            quantize(stack, self._group_size, self._num_bits).parts for stack in stacks
        ]
        self._reserve_parts(self._columns(count))
        at, self.ahead = columns_at(self._positions(), count), max(self.ahead, count)
        written = [
            tuple(
                put_columns(slab, at, part)
                for slab, part in zip(slabs, parts, strict=True)
            )
            for slabs, parts in zip((self.keys, self.values), new, strict=False)
        ]
        self.keys, self.values = written if len(written) == 2 else (written[0], ())

    @property
    def has_graphs_kernels(self) -> bool:  # type: ignore[override]
        """False for packed products: a graph can fuse their scaling and masking."""
        return self.few_bits == KERNEL

    def graph_key(self) -> tuple[Any, ...]:
        self._reserve_parts(self._columns(1))
        return (tuple(part.shape for part in self.arrays()), self.keys[1].dtype)

    def arrays(self) -> list[mx.array]:
        return [
            part
            for slabs in (self.keys, self.values)
            if slabs is not None
            for part in slabs
        ]

    @property
    def _is_stacked(self) -> bool:
        keys, values = self._layouts
        return keys == values

    def _halves(self) -> list[tuple[Sequence[mx.array], slice]]:
        """(slabs, heads) of keys and of values."""
        if not self._is_stacked:
            return [(self.keys, slice(None)), (self.values, slice(None))]
        return [
            (self.keys, slice(self._heads[0])),
            (self.keys, slice(self._heads[0], None)),
        ]

    @property
    def state(self) -> Any:
        slabs = (self.keys, self.keys if self._is_stacked else self.values)
        firsts = (0, self._heads[0] if self._is_stacked else 0)
        keys, values = (
            of_slab(parts, layout, first, heads)
            for parts, layout, first, heads in zip(
                slabs, self._layouts, firsts, self._heads, strict=True
            )
        )
        if self.few_bits == KERNEL:
            return keys, values
        return (
            unpacked(keys, values)
            if self.few_bits == UNPACKED
            else (keys.cut(), values.cut())
        )

    def _change(self, change: Callable[[mx.array], mx.array]) -> None:
        if self.keys is not None:
            self.keys, self.values = (
                tuple(map(change, slabs)) for slabs in (self.keys, self.values)
            )

    def _reserve_parts(self, tokens: int) -> None:
        if tokens <= self.capacity:
            return
        capacity, places = self._capacity(tokens), self.num_places
        slabs_grown: list[tuple[mx.array, ...]] = []
        for slabs, parts in zip((self.keys, self.values), self._parts, strict=False):
            old = slabs or (None,) * len(parts)
            shapes = [
                ((places, heads, capacity, width), dtype)
                for heads, width, dtype in parts
            ]
            slabs_grown.append(
                tuple(widened(o, *shape) for o, shape in zip(old, shapes, strict=True))
            )
        self.keys, self.values = (
            slabs_grown if len(slabs_grown) == 2 else (slabs_grown[0], ())
        )
