"""Decode attention over TurboQuant's codes on CUDA (``few_bits.cu``), in the rotated space.

Queries come rotated, and the output is to be rotated back. A row's output depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.cuda.few_bits import (
    MOST_HEADS,
    SPAN,
    THREADS,
    TYPES,
    WIDEST,
    fits_mask,
)
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
from vlm_batch.caches.turbo import TurboLayout, TurboStates
from vlm_batch.runtime.device import Device, device

#: Widths of heads are multiples of this, so that a head's words lie together.
STEP = 32
#: The largest allowed error against attention over the same numbers, in the values' unit.
TOLERANCE = 1e-3

_PARTS = ("norms", "codes")
_INPUTS = (
    "queries",
    *(f"{what}_{part}" for what in ("keys", "values") for part in _PARTS),
    "books",
    "mask",
)


def _coded(what: str, bits: str, book: str) -> str:
    views = [
        f"{{{name}, {name}_strides[0], {name}_strides[1], {name}_strides[2]}}"
        for name in (f"{what}_codes", f"{what}_norms")
    ]
    kind = f"few_bits::Coded<S, {bits}>"
    return f"const {kind} {what} = {{{', '.join(views)}, {book}}};"


#: The books are seen by all threads after the first barrier of ``attend_span``.
_BODY = f"""
  constexpr int NUMBERS_K = 1 << BITS_K, NUMBERS = NUMBERS_K + (1 << BITS_V);
  __shared__ float book[NUMBERS];
  for (int i = threadIdx.x; i < NUMBERS; i += few_bits::THREADS) book[i] = books[i];
  {_coded("keys", "BITS_K", "book")}
  {_coded("values", "BITS_V", "book + NUMBERS_K")}
  few_bits::attend_span<float, decltype(keys), decltype(values), M, DEPTH_K, DEPTH_V, SHARE, HEADS, IS_MASKED>(
      queries, queries_strides[0], queries_strides[1], queries_strides[3], keys, values,
      mask, BY_ROW ? mask_strides[0] : 0, mask_strides[3], keys_codes_shape[2], 1.0f, sums, stats);
"""


@lru_cache(maxsize=1)
def span_kernel() -> Kernel:
    return kernel(
        "few_bits", "turned", _INPUTS, ("sums", "stats"), _BODY, uses=("masks",)
    )


class TurnedBuild(NamedTuple):
    """The facts that a kernel is built for."""

    heads: int  # of queries
    kv_heads: int
    keys: TurboLayout
    values: TurboLayout
    mask: mx.Dtype | None
    is_by_row: bool  # whether each row has its own mask


@lru_cache(maxsize=256)
def launches_of(build: TurnedBuild, rows: int, columns: int) -> tuple[Launch, Launch]:
    share = build.heads // build.kv_heads
    tiles = -(-share // MOST_HEADS)
    spans = -(-columns // SPAN)
    depth = build.values.depth
    template = {
        "S": mx.float16,
        "M": mx.float32 if build.mask is None else build.mask,
        "BITS_K": build.keys.bits,
        "BITS_V": build.values.bits,
        "DEPTH_K": build.keys.depth,
        "DEPTH_V": depth,
        "SHARE": share,
        "HEADS": -(-share // tiles),
        "IS_MASKED": build.mask is not None,
        "BY_ROW": build.is_by_row,
    }
    first = Launch(
        span_kernel(),
        tuple(template.items()),
        (THREADS * spans, build.kv_heads * tiles, rows),
        (THREADS, 1, 1),
        ((rows, build.heads, spans, depth), (rows, build.heads, spans, 2)),
        (mx.float32, mx.float32),
    )
    return first, merging(mx.float32, rows, build.heads, depth)


def attend_where_right(
    queries: mx.array, keys: TurboStates, values: TurboStates, mask: Any
) -> mx.array | None:
    """Run ``attend`` if the kernels support these arrays accurately here, else return None."""
    if device() is not Device.CUDA or not fits_mask(mask, len(queries), keys.shape[2]):
        return None
    build = build_of(queries, keys, values, mask)
    if not is_served(build) or not _is_right(build):
        return None
    return attend(queries, keys, values, mask, on_device)


def attend(
    queries: mx.array, keys: TurboStates, values: TurboStates, mask: Any, run: Run
) -> mx.array:
    """Attend with scaled, rotated queries (B, H, 1, D) in float32: rotated (B, H, 1, D_v).

    Args:
        mask: (B or 1, 1, 1, C), bool or additive; None or "causal" hides nothing. Hidden columns are not read.
        run: Runs a launch.
    """
    build = build_of(queries, keys, values, mask)
    first, last = launches_of(build, len(queries), keys.shape[2])
    shown = queries if build.mask is None else mask
    books = _books(build.keys, build.values)
    sums, stats = run(first, [queries, *keys.parts, *values.parts, books, shown])
    return run(last, [sums, stats])[0]


@lru_cache(maxsize=16)
def _books(keys: TurboLayout, values: TurboLayout) -> mx.array:
    return mx.array(np.concatenate([keys.book.numbers, values.book.numbers]))


def build_of(
    queries: mx.array, keys: TurboStates, values: TurboStates, mask: Any
) -> TurnedBuild:
    is_masked = isinstance(mask, mx.array)
    return TurnedBuild(
        queries.shape[1],
        keys.shape[1],
        keys.layout,
        values.layout,
        mask.dtype if is_masked else None,
        is_masked and mask.shape[0] > 1,
    )


@lru_cache(maxsize=64)
def is_served(build: TurnedBuild) -> bool:
    """Whether the kernels are written for a build."""
    depths = (build.keys.depth, build.values.depth)
    needs = (
        all(depth % STEP == 0 and depth <= WIDEST for depth in depths),
        build.heads % build.kv_heads == 0,
        build.mask is None or build.mask in (mx.bool_, *TYPES),
    )
    return all(needs)


@lru_cache(maxsize=64)
def _is_right(build: TurnedBuild) -> bool:
    return is_right(
        lambda: farthest(build, on_device),
        TOLERANCE,
        "TurboQuant's codes are looked up for attention: its kernel",
    )


def farthest(
    build: TurnedBuild,
    run: Run,
    lengths: Sequence[int] = (300, 131),
    columns: int = 320,
    seed: int = 0,
) -> float:
    """Return the largest error against exact attention over random rows with NaN behind them."""
    queries, keys, values, mask = example(build, lengths, columns, seed)
    found = attend(queries, keys, values, mask, run)
    if build.mask is None:
        lengths = [columns] * len(lengths)
    elif not build.is_by_row:
        lengths = [lengths[0]] * len(lengths)
    wide = [states.directions() * states.norms for states in (keys, values)]
    return error_of(found, queries, wide[0], wide[1], 1.0, lengths)


def example(
    build: TurnedBuild, lengths: Sequence[int], columns: int, seed: int
) -> tuple[mx.array, TurboStates, TurboStates, mx.array | None]:
    """Return random queries, keys, values and a mask; norms behind rows are NaN."""
    random = np.random.RandomState(seed)
    rows = len(lengths)
    ends = np.array(lengths if build.is_by_row else [lengths[0]] * rows)
    if build.mask is None:
        ends = np.full(rows, columns)
    behind = mx.array(np.arange(columns)[None] >= ends[:, None])  # (B, C)

    def states(layout: TurboLayout) -> TurboStates:
        shape = (rows, build.kv_heads, columns, layout.depth)
        coded = layout.code(mx.array(random.standard_normal(shape).astype(np.float32)))
        nothing = mx.array(mx.nan, mx.float16)
        norms = mx.where(behind[:, None, :, None], nothing, coded.norms)
        return coded._replace(norms=norms)

    keys, values = states(build.keys), states(build.values)
    size = (rows, build.heads, 1, build.keys.depth)
    queries = random.standard_normal(size) * 2 * build.keys.depth**-0.5
    mask = None
    if build.mask is not None:
        hidden = behind[: rows if build.is_by_row else 1, None, None]
        mask = ~hidden
        if build.mask != mx.bool_:
            least = mx.array(mx.finfo(build.mask).min, build.mask)
            mask = mx.where(hidden, least, mx.array(0, build.mask))
    return mx.array(queries.astype(np.float32)), keys, values, mask
