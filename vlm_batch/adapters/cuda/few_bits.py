"""Decode attention over quantised keys and values on CUDA (``few_bits.cu``).

MLX 0.32 cannot attend over packed numbers. These kernels unpack in registers, a block per span of columns. A row's
output depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.cuda import spans
from vlm_batch.adapters.cuda.launches import (
    Kernel,
    Launch,
    Run,
    is_right,
    merging,
    on_device,
)
from vlm_batch.adapters.cuda.one_query import error_of
from vlm_batch.adapters.cuda.spans import TYPES, MaskForm
from vlm_batch.arrays import round_up
from vlm_batch.caches.quantized import (
    PackedLayout,
    SlabStates,
    of_slab,
    quantize,
)
from vlm_batch.runtime.device import Device, device

#: The largest allowed error against exact attention, in the values' unit.
TOLERANCE = 0.02


#: The arrays of quantised keys or values.
_PARTS = ("packed", "scales", "biases")


def _views(what: str, first: str) -> str:
    views = ", ".join(
        f"{{{name} + {first} * {name}_strides[1], {name}_strides[0], {name}_strides[1], {name}_strides[2]}}"
        for name in (f"{what}_{part}" for part in _PARTS)
    )
    return f"const few_bits::Quantized<S, BITS, GROUP> {what} = {{{views}}};"


@lru_cache(maxsize=8)
def span_kernel(scale: float) -> Kernel:
    views = _views("keys", "FIRST_K") + _views("values", "FIRST_V")
    return spans.span_kernel("spans", _PARTS, views, scale)


class FewBitsBuild(NamedTuple):
    """The facts that a kernel is built for."""

    scale: float
    heads: int  # query heads
    depth: int
    # the layout, the first head in the slab, the number of heads
    keys: tuple[PackedLayout, int, int]
    values: tuple[PackedLayout, int, int]
    dtype: mx.Dtype
    scales: mx.Dtype
    mask: MaskForm


@lru_cache(maxsize=256)
def launches_of(build: FewBitsBuild, rows: int, columns: int) -> tuple[Launch, Launch]:
    (layout, first_k, kv_heads), (layout_v, first_v, _) = build.keys, build.values
    facts = {
        "S": build.scales,
        "BITS": layout.bits,
        "GROUP": layout.group_size,
        "FIRST_K": first_k,
        "FIRST_V": first_v,
    }
    spanning = spans.span_launch(
        span_kernel(build.scale),
        facts,
        (build.heads, kv_heads),
        (build.depth, layout_v.depth),
        build.dtype,
        build.mask,
        (rows, columns),
    )
    return spanning, merging(build.dtype, rows, build.heads, layout_v.depth)


def attend_where_right(
    queries: mx.array, keys: SlabStates, values: SlabStates, scale: float, mask: Any
) -> mx.array | None:
    """Run ``attend`` if the kernels support these arrays accurately here, else return None."""
    if device() is not Device.CUDA or queries.shape[2] != 1:
        return None
    if not spans.fits_mask(mask, queries.shape[0], keys.columns):
        return None
    if keys.scales.dtype != values.scales.dtype:
        return None
    build = build_of(queries, keys, values, scale, mask)
    if not is_served(build) or not _is_right(build):
        return None
    return _attend(build, queries, keys, values, mask, on_device)


def attend(
    queries: mx.array,
    keys: SlabStates,
    values: SlabStates,
    scale: float,
    mask: Any,
    run: Run,
) -> mx.array:
    """Attend with queries (B, H, 1, D) over quantised slabs: (B, H, 1, D_v).

    Args:
        mask: (B or 1, 1, 1, C), bool or additive; None or "causal" hides nothing. Hidden columns are not read.
        run: Runs a launch.
    """
    return _attend(
        build_of(queries, keys, values, scale, mask), queries, keys, values, mask, run
    )


def _attend(
    build: FewBitsBuild,
    queries: mx.array,
    keys: SlabStates,
    values: SlabStates,
    mask: Any,
    run: Run,
) -> mx.array:
    first, last = launches_of(build, queries.shape[0], keys.columns)
    shown = queries if build.mask.dtype is None else mask
    sums, stats = run(first, [queries, *keys.parts, *values.parts, shown])
    return run(last, [sums, stats])[0]


def build_of(
    queries: mx.array, keys: SlabStates, values: SlabStates, scale: float, mask: Any
) -> FewBitsBuild:
    _, heads, _, depth = queries.shape
    one, other = (
        (states.layout, states.first, states.heads) for states in (keys, values)
    )
    return FewBitsBuild(
        float(scale),
        heads,
        depth,
        one,
        other,
        queries.dtype,
        keys.scales.dtype,
        MaskForm.of(mask),
    )


@lru_cache(maxsize=64)
def is_served(build: FewBitsBuild) -> bool:
    """Whether the kernels are written for a build."""
    (layout, _, kv_heads), (layout_v, _, kv_heads_v) = build.keys, build.values
    wide = round_up(layout.depth, layout.group_size)
    wide_v = round_up(layout_v.depth, layout_v.group_size)
    types = {build.dtype, build.scales} | ({build.mask.dtype} - {None, mx.bool_})
    needs = (
        layout[:2] == layout_v[:2],
        build.depth == layout.depth,
        max(wide, wide_v) <= spans.WIDEST,
        kv_heads == kv_heads_v,
        build.heads % kv_heads == 0,
        types <= set(TYPES),
    )
    return all(needs)


@lru_cache(maxsize=64)
def _is_right(build: FewBitsBuild) -> bool:
    return is_right(
        lambda: farthest(build, on_device),
        TOLERANCE,
        "keys in few bits are unpacked for attention: its kernel",
    )


def farthest(
    build: FewBitsBuild,
    run: Run,
    lengths: Sequence[int] = (300, 131),
    columns: int = 320,
    seed: int = 0,
) -> float:
    """Return the largest error against exact attention over random rows with NaN behind them."""
    queries, keys, values, mask = example(build, lengths, columns, seed)
    found = attend(queries, keys, values, build.scale, mask, run)
    seen = build.mask.seen(lengths, columns)
    wide = _in_full(keys), _in_full(values)
    return error_of(found, queries, *wide, build.scale, seen)


def example(
    build: FewBitsBuild, lengths: Sequence[int], columns: int, seed: int
) -> tuple[mx.array, SlabStates, SlabStates, mx.array | None]:
    random = np.random.RandomState(seed)
    rows = len(lengths)
    behind = spans.behind_rows(build.mask.seen(lengths, columns), columns)

    def slab(which: tuple[PackedLayout, int, int], heads: int) -> tuple[mx.array, ...]:
        layout = which[0]
        array = mx.array(
            random.standard_normal((rows, heads, columns, layout.depth)).astype(
                np.float32
            )
        )
        packed, scales, biases = quantize(
            array.astype(build.scales), layout.group_size, layout.bits
        ).parts
        return (
            packed,
            mx.where(behind[:, None, :, None], mx.array(mx.nan, build.scales), scales),
            biases,
        )

    whole = [slab(which, which[1] + which[2]) for which in (build.keys, build.values)]
    # values behind the keys in one slab
    slabs = [whole[1]] * 2 if build.values[1] else whole
    keys, values = (
        of_slab(parts, *which)
        for parts, which in zip(slabs, (build.keys, build.values), strict=True)
    )
    queries = mx.array(
        random.standard_normal((rows, build.heads, 1, build.depth)).astype(np.float32)
        * 2
    )
    mask = build.mask.example(behind)
    return queries.astype(build.dtype), keys, values, mask


def _in_full(states: SlabStates) -> mx.array:
    """Dequantise to float32 (B, H, C, D)."""
    packed, scales, biases = states.cut().parts
    parts = [packed, scales.astype(mx.float32), biases.astype(mx.float32)]
    return states.layout.states(parts).dequantized()
