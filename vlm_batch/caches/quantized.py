"""Keys and values quantised by ``mx.quantize``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from vlm_batch.arrays import own_array
from vlm_batch.caches.coded import CodedCache, CodedSlabCache
from vlm_batch.caches.states import LayerState, filed
from vlm_batch.policy import KERNEL, PACKED, UNPACKED
from vlm_batch.runtime.device import Device, device


class PackedLayout(NamedTuple):
    """The layout of heads of ``depth`` numbers, padded to whole groups."""

    group_size: int
    bits: int
    depth: int

    def code(self, array: mx.array) -> QuantizedStates:
        """Quantise (B, H, L, D)."""
        filled = _filled(array, self.group_size)
        return self.states(
            mx.quantize(filled, group_size=self.group_size, bits=self.bits)
        )

    def code_with(
        self, other: PackedLayout, keys: mx.array, values: mx.array
    ) -> tuple[QuantizedStates, QuantizedStates]:
        """Quantise keys, and values by another layout."""
        return self.code(keys), other.code(values)

    def num_stacked(self, other: PackedLayout) -> int:
        return 3 if self == other else 0

    def code_stacked(
        self, other: PackedLayout, keys: mx.array, values: mx.array
    ) -> list[mx.array]:
        if self != other:
            return [*self.code(keys).parts, *other.code(values).parts]
        return list(self.code(mx.concatenate([keys, values], axis=1)).parts)

    def states(self, parts: Sequence[mx.array]) -> QuantizedStates:
        packed, scales, biases = parts
        return QuantizedStates(packed, scales, biases, self)


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
        return self.map(lambda part: part[:, :, begin:end])

    def map(self, change: Any) -> QuantizedStates:
        return self.layout.states([change(part) for part in self.parts])

    def of_row(self, row: int) -> QuantizedStates:
        """Return one row's, as (1, H, L, D)."""
        return self.map(lambda part: part[row : row + 1])

    def dequantized(self) -> mx.array:
        packed, scales, biases = (mx.contiguous(part) for part in self.parts)
        group_size, bits, depth = self.layout
        return mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits)[
            ..., :depth
        ]


def quantize(array: mx.array, group_size: int, bits: int) -> QuantizedStates:
    """Quantise (B, H, L, D) along D."""
    return PackedLayout(group_size, bits, array.shape[-1]).code(array)


def _filled(array: mx.array, group_size: int) -> mx.array:
    missing = -array.shape[-1] % group_size
    if not missing:
        return array
    return mx.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])


class QuantizedCache(CodedCache):
    """One row's quantised keys and values."""

    def __init__(self, group_size: int, bits: int) -> None:
        super().__init__()
        self.group_size = group_size
        self.bits = bits

    def fresh(self) -> QuantizedCache:
        return QuantizedCache(self.group_size, self.bits)

    def layouts(
        self, key_depth: int, value_depth: int
    ) -> tuple[PackedLayout, PackedLayout]:
        of_keys = PackedLayout(self.group_size, self.bits, key_depth)
        return of_keys, of_keys._replace(depth=value_depth)

    def slab(self, num_places: int) -> QuantizedSlabCache:
        return QuantizedSlabCache(num_places, self.group_size, self.bits)

    def saved(self, length: int) -> QuantizedState:
        keys, values = self.state
        return QuantizedState(
            tuple(map(own_array, keys.parts)),
            tuple(map(own_array, values.parts)),
            self.group_size,
            self.bits,
            (keys.layout.depth, values.layout.depth),
        )


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
        of_keys, of_values = cache.layouts(*self.depths)
        keys = of_keys.states(self.keys).between(0, length)
        values = of_values.states(self.values).between(0, length)
        return cache.holding(keys, values, length)


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
        return self.layout.states([part[:, self.span] for part in self.parts])


def of_slab(
    parts: Sequence[mx.array], layout: PackedLayout, first: int, heads: int
) -> SlabStates:
    packed, scales, biases = parts
    return SlabStates(packed, scales, biases, layout, first, heads)


def unpacked(keys: SlabStates, values: SlabStates) -> tuple[mx.array, mx.array]:
    """Dequantise keys and values (S, H, C, D), together if they share slabs."""
    if keys.packed is not values.packed:
        return keys.cut().dequantized(), values.cut().dequantized()
    both = keys.layout.states(keys.parts).dequantized()
    return both[:, keys.span], both[:, values.span]


class QuantizedSlabCache(CodedSlabCache):
    """Full attention as quantised slabs: packed numbers, scales, biases.

    ``few_bits`` decides if models get QuantizedStates, SlabStates or arrays.
    """

    def __init__(
        self, num_places: int, group_size: int, bits: int, *, few_bits: str = PACKED
    ) -> None:
        super().__init__(
            num_places, QuantizedCache(group_size, bits), few_bits=few_bits
        )

    @property
    def state(self) -> Any:
        of_keys, of_values = self._layouts
        num_keys, num_values = self._heads
        behind_keys = num_keys if self._num_stacked() else 0
        keys = of_slab(self.slabs[:3], of_keys, 0, num_keys)
        values = of_slab(self.slabs[-3:], of_values, behind_keys, num_values)
        if self.few_bits == KERNEL:
            return keys, values
        if self.few_bits == UNPACKED:
            return unpacked(keys, values)
        return keys.cut(), values.cut()


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
