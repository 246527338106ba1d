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

from vlm_batch.adapters.cuda.launches import (
    Kernel,
    Launch,
    Run,
    is_right,
    kernel,
    merging,
    on_device,
)
from vlm_batch.adapters.cuda.one_query import error_of
from vlm_batch.arrays import round_up
from vlm_batch.caches.quantized import (
    PackedLayout,
    SlabStates,
    of_slab,
    quantize,
)
from vlm_batch.runtime.device import Device, device

#: Equal to the constants of ``few_bits.cu``.
THREADS = SPAN = 128
#: Query heads per block.
MOST_HEADS = 8
#: The widest head, padded to whole groups, that fits a block.
WIDEST = 256
TYPES = (mx.float32, mx.bfloat16, mx.float16)
#: The largest allowed error against exact attention, in the values' unit.
TOLERANCE = 0.02


#: The arrays of quantised keys or values.
_PARTS = ("packed", "scales", "biases")
_SPAN_INPUTS = (
    "queries",
    *(f"{what}_{part}" for what in ("keys", "values") for part in _PARTS),
    "mask",
)


def _views(what: str, first: str) -> str:
    views = ", ".join(
        f"{{{name} + {first} * {name}_strides[1], {name}_strides[0], {name}_strides[1], {name}_strides[2]}}"
        for name in (f"{what}_{part}" for part in _PARTS)
    )
    return f"const few_bits::Quantized<S, BITS, GROUP> {what} = {{{views}}};"


@lru_cache(maxsize=8)
def span_kernel(scale: float) -> Kernel:
    body = f"""
  {_views("keys", "FIRST_K")}
  {_views("values", "FIRST_V")}
  few_bits::attend_span<T, decltype(keys), decltype(values), M, DEPTH_K, DEPTH_V, SHARE, HEADS, IS_MASKED>(
      queries, queries_strides[0], queries_strides[1], queries_strides[3], keys, values,
      mask, BY_ROW ? mask_strides[0] : 0, mask_strides[3], keys_packed_shape[2], {scale!r}f, sums, stats);
"""
    return kernel(
        "few_bits", "spans", _SPAN_INPUTS, ("sums", "stats"), body, uses=("masks",)
    )


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
    mask: mx.Dtype | None
    is_by_row: bool  # whether each row has its own mask


@lru_cache(maxsize=256)
def launches_of(build: FewBitsBuild, rows: int, columns: int) -> tuple[Launch, Launch]:
    (layout, first_k, kv_heads), (layout_v, first_v, _) = build.keys, build.values
    share = build.heads // kv_heads
    tiles, spans, wide = -(-share // MOST_HEADS), -(-columns // SPAN), layout_v.depth
    template = {
        **{
            "T": build.dtype,
            "S": build.scales,
            "M": build.dtype if build.mask is None else build.mask,
        },
        **{
            "BITS": layout.bits,
            "GROUP": layout.group_size,
            "DEPTH_K": build.depth,
            "DEPTH_V": wide,
        },
        **{
            "SHARE": share,
            "HEADS": -(-share // tiles),
            "FIRST_K": first_k,
            "FIRST_V": first_v,
        },
        **{"IS_MASKED": build.mask is not None, "BY_ROW": build.is_by_row},
    }
    shapes = ((rows, build.heads, spans, wide), (rows, build.heads, spans, 2))
    grid = (THREADS * spans, kv_heads * tiles, rows)
    first = Launch(
        span_kernel(build.scale),
        tuple(template.items()),
        grid,
        (THREADS, 1, 1),
        shapes,
        (mx.float32, mx.float32),
    )
    return first, merging(build.dtype, rows, build.heads, wide)


def attend_where_right(
    queries: mx.array, keys: SlabStates, values: SlabStates, scale: float, mask: Any
) -> mx.array | None:
    """Run ``attend`` if the kernels support these arrays accurately here, else return None."""
    if device() is not Device.CUDA or queries.shape[2] != 1:
        return None
    if not fits_mask(mask, queries.shape[0], keys.columns):
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
    sums, stats = run(
        first,
        [
            queries,
            *keys.parts,
            *values.parts,
            queries if build.mask is None else mask,
        ],
    )
    return run(last, [sums, stats])[0]


def build_of(
    queries: mx.array, keys: SlabStates, values: SlabStates, scale: float, mask: Any
) -> FewBitsBuild:
    masked, is_by_row = (
        (mask.dtype, mask.shape[0] > 1) if isinstance(mask, mx.array) else (None, False)
    )
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
        masked,
        is_by_row,
    )


def fits_mask(mask: Any, rows: int, columns: int) -> bool:
    """Whether a mask is none, or (B or 1, 1, 1, C)."""
    if not isinstance(mask, mx.array):
        return True
    if mask.ndim != 4 or mask.shape[0] not in (1, rows):
        return False
    return tuple(mask.shape[1:]) == (1, 1, columns)


@lru_cache(maxsize=64)
def is_served(build: FewBitsBuild) -> bool:
    """Whether the kernels are written for a build."""
    (layout, _, kv_heads), (layout_v, _, kv_heads_v) = build.keys, build.values
    wide = round_up(layout.depth, layout.group_size)
    wide_v = round_up(layout_v.depth, layout_v.group_size)
    types = {build.dtype, build.scales} | ({build.mask} - {None, mx.bool_})
    needs = (
        layout[:2] == layout_v[:2],
        build.depth == layout.depth,
        max(wide, wide_v) <= WIDEST,
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
    if build.mask is None:
        lengths = [columns] * len(lengths)
    elif not build.is_by_row:
        lengths = [lengths[0]] * len(lengths)
    return error_of(
        found, queries, _in_full(keys), _in_full(values), build.scale, lengths
    )


def example(
    build: FewBitsBuild, lengths: Sequence[int], columns: int, seed: int
) -> tuple[mx.array, SlabStates, SlabStates, mx.array | None]:
    random = np.random.RandomState(seed)
    rows = len(lengths)
    ends = np.array(lengths if build.is_by_row else [lengths[0]] * rows)
    # (B, C)
    behind = mx.array(
        np.arange(columns)[None] >= (columns if build.mask is None else ends[:, None])
    )

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
    mask = None
    if build.mask is not None:
        hidden = behind[: rows if build.is_by_row else 1, None, None]
        mask = (
            ~hidden
            if build.mask == mx.bool_
            else mx.where(
                hidden,
                mx.array(mx.finfo(build.mask).min, build.mask),
                mx.array(0, build.mask),
            )
        )
    return queries.astype(build.dtype), keys, values, mask


def _in_full(states: SlabStates) -> mx.array:
    """Dequantise to float32 (B, H, C, D)."""
    packed, scales, biases = states.cut().parts
    parts = [packed, scales.astype(mx.float32), biases.astype(mx.float32)]
    return states.layout.states(parts).dequantized()
