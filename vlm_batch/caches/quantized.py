"""Keys and values quantised by ``mx.quantize``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_vlm.models.cache import create_attention_mask

from vlm_batch.arrays import num_bytes, own_array, round_up
from vlm_batch.caches.drafted import NO_LIMIT
from vlm_batch.caches.layers import CacheKind, LayerCache, Placement, row_of
from vlm_batch.caches.rows import RowsCache
from vlm_batch.caches.slab import SlabCache, columns_at, put_columns, widened
from vlm_batch.caches.states import LayerState, filed
from vlm_batch.policy import KERNEL, PACKED, UNPACKED
from vlm_batch.runtime.device import Device, device

#: Growth of a row's cache, in columns.
STEP = 256


#: (heads, width, dtype) of a part of a slab.
PartForm = tuple[int, int, mx.Dtype]


class PackedLayout(NamedTuple):
    """The layout of heads of ``depth`` numbers, padded to whole groups."""

    group_size: int
    bits: int
    depth: int


class QuantizedStates(NamedTuple):
    """Quantised keys or values (B, H, L, D) in place of an array."""

    packed: mx.array  # (B, H, L, D * bits / 32) uint32
    scales: mx.array  # (B, H, L, D / group_size)
    biases: mx.array
    layout: PackedLayout

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
    layout: PackedLayout
    first: int  # head
    heads: int

    @property
    def columns(self) -> int:
        return int(self.packed.shape[2])

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + self.heads)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.packed.shape[0], self.heads, self.columns, self.layout.depth)

    @property
    def parts(self) -> tuple[mx.array, mx.array, mx.array]:
        return (self.packed, self.scales, self.biases)

    def cut(self) -> QuantizedStates:
        """Return its heads alone."""
        return of_parts([part[:, self.span] for part in self.parts], self.layout)


def of_slab(
    parts: Sequence[mx.array], layout: PackedLayout, first: int, heads: int
) -> SlabStates:
    packed, scales, biases = parts
    return SlabStates(packed, scales, biases, layout, first, heads)


def unpacked(keys: SlabStates, values: SlabStates) -> tuple[mx.array, mx.array]:
    """Dequantise keys and values (S, H, C, D), together if they share slabs."""
    if keys.packed is not values.packed:
        return keys.cut().dequantized(), values.cut().dequantized()
    both = of_parts(keys.parts, keys.layout).dequantized()
    return both[:, keys.span], both[:, values.span]


def of_parts(parts: Sequence[mx.array], layout: PackedLayout) -> QuantizedStates:
    packed, scales, biases = parts
    return QuantizedStates(packed, scales, biases, layout)


def quantize(array: mx.array, group_size: int, bits: int) -> QuantizedStates:
    """Quantise (B, H, L, D) along D."""
    layout = PackedLayout(group_size, bits, array.shape[-1])
    return of_parts(
        mx.quantize(_filled(array, group_size), group_size=group_size, bits=bits),
        layout,
    )


def _filled(array: mx.array, group_size: int) -> mx.array:
    missing = -array.shape[-1] % group_size
    if not missing:
        return array
    return mx.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])


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
        self.keys = self._append(self.keys, keys)
        self.values = self._append(self.values, values)
        self.offset += keys.shape[2]
        return self.state

    def _append(self, held: QuantizedStates | None, new: mx.array) -> QuantizedStates:
        """Write ``new`` (1, H, L, D) behind the cached tokens, growing the arrays."""
        coded, begin = quantize(new, self.group_size, self.bits), self.offset
        end = begin + new.shape[2]
        if held is None:
            return coded.map(lambda part: _joined([part]))
        if end > held.packed.shape[2]:
            old = held.between(0, begin)
            pairs = zip(old.parts, coded.parts, strict=True)
            return of_parts([_joined(list(pair)) for pair in pairs], coded.layout)
        for part, piece in zip(held.parts, coded.parts, strict=True):
            part[:, :, begin:end] = piece
        return held

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
        return num_bytes((self.keys, self.values))

    def bytes_at(self, tokens: int, seen: int) -> int:
        return super().bytes_at(round_up(tokens, STEP), seen)

    def saved(self, length: int) -> QuantizedState:
        keys, values = self.state
        return QuantizedState(
            tuple(map(own_array, keys.parts)),
            tuple(map(own_array, values.parts)),
            self.group_size,
            self.bits,
            (keys.layout.depth, values.layout.depth),
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
        of_keys, of_values = (
            PackedLayout(self.group_size, self.bits, depth) for depth in self.depths
        )
        cache.keys = of_parts(self.keys, of_keys).between(0, length)
        cache.values = of_parts(self.values, of_values).between(0, length)
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
        return mx.fast.scaled_dot_product_attention(
            queries,
            keys.dequantized(),
            values.dequantized(),
            scale=scale,
            mask=mask,
            sinks=sinks,
        )
    groups = keys.shape[1]
    group_size, bits, _ = keys.layout
    product = partial(mx.quantized_matmul, group_size=group_size, bits=bits)
    # MLX 0.32 has no product of strided columns (supports_qmm_naive)
    if device() is Device.CUDA:
        keys, values = keys.map(mx.contiguous), values.map(mx.contiguous)
    # heads that share keys become rows
    grouped = _filled(queries * scale, group_size).reshape(
        batch, groups, heads // groups, -1
    )
    scores = product(grouped, *keys.parts, transpose=True)  # (B, G, H / G, K)
    if isinstance(mask, mx.array):  # "causal" hides nothing from the last query
        scores = _hidden(scores, _by_group(mask, groups, heads))
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


def _hidden(scores: mx.array, mask: mx.array) -> mx.array:
    """Apply a mask, bool (True attends) or additive."""
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, -mx.inf)
    return scores + mask


def _by_group(mask: mx.array, groups: int, heads: int) -> mx.array:
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if mask.shape[1] == 1:
        return mask
    return mask.reshape(mask.shape[0], groups, heads // groups, mask.shape[3])


def _joined(parts: list[mx.array]) -> mx.array:
    """Join columns, and zeros up to a multiple of ``STEP``."""
    last = parts[-1]
    missing = -sum(part.shape[2] for part in parts) % STEP
    if missing:
        zeros = mx.zeros((*last.shape[:2], missing, last.shape[3]), last.dtype)
        parts = [*parts, zeros]
    return last if len(parts) == 1 else mx.concatenate(parts, axis=2)


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
        self._layouts: list[PackedLayout] = []
        #: (heads, width, dtype) of every part of every slab.
        self._parts: list[list[PartForm]] = []

    def put(self, place: int, cache: QuantizedCache) -> None:
        length, states = cache.offset, cache.state
        keys, values = states
        self._layouts = [keys.layout, values.layout]
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
        cache = QuantizedCache(self._group_size, self._num_bits)
        cache.offset = self._lengths[place]
        halves: list[QuantizedStates] = []
        for (slabs, heads), layout in zip(self._halves(), self._layouts, strict=True):
            at = (slice(place, place + 1), heads, slice(cache.offset))
            halves.append(of_parts([own_array(slab[at]) for slab in slabs], layout))
        cache.keys, cache.values = halves
        return cache

    def append(self, keys: mx.array, values: mx.array) -> None:
        count = keys.shape[2]
        if self._is_stacked:
            together = self._coded(mx.concatenate([keys, values], axis=1))
            new = [together, ()]
        else:
            new = [self._coded(keys), self._coded(values)]
        self._reserve_parts(self._columns(count))
        at, self.ahead = columns_at(self._positions(), count), max(self.ahead, count)
        written: list[tuple[mx.array, ...]] = []
        for slabs, parts in zip((self.keys, self.values), new, strict=True):
            pairs = zip(slabs, parts, strict=True)
            written.append(tuple(put_columns(slab, at, part) for slab, part in pairs))
        self.keys, self.values = written

    def _coded(self, array: mx.array) -> tuple[mx.array, ...]:
        return quantize(array, self._group_size, self._num_bits).parts

    @property
    def has_graphs_kernels(self) -> bool:  # type: ignore[override]
        """False for packed products: a graph can fuse their scaling and masking."""
        return self.few_bits == KERNEL

    def graph_key(self) -> tuple[Any, ...]:
        self._reserve_parts(self._columns(1))
        return (tuple(part.shape for part in self.arrays()), self.keys[1].dtype)

    def arrays(self) -> list[mx.array]:
        return [*(self.keys or ()), *(self.values or ())]

    @property
    def _is_stacked(self) -> bool:
        keys, values = self._layouts
        return keys == values

    def _halves(self) -> list[tuple[Sequence[mx.array], slice]]:
        """(slabs, heads) of keys and of values."""
        if not self._is_stacked:
            return [(self.keys, slice(None)), (self.values, slice(None))]
        behind_keys = self._heads[0]
        return [
            (self.keys, slice(behind_keys)),
            (self.keys, slice(behind_keys, None)),
        ]

    @property
    def state(self) -> Any:
        of_keys, of_values = self._layouts
        num_keys, num_values = self._heads
        keys = of_slab(self.keys, of_keys, 0, num_keys)
        if self._is_stacked:
            values = of_slab(self.keys, of_values, num_keys, num_values)
        else:
            values = of_slab(self.values, of_values, 0, num_values)
        if self.few_bits == KERNEL:
            return keys, values
        if self.few_bits == UNPACKED:
            return unpacked(keys, values)
        return keys.cut(), values.cut()

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


def _forms(states: QuantizedStates, heads: int) -> list[PartForm]:
    """Return the forms of a slab's parts with so many heads."""
    return [(heads, part.shape[3], part.dtype) for part in states.parts]
