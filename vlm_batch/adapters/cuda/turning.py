"""Decode attention over TurboQuant's codes on CUDA (``few_bits.cu``, ``turbo.cu``).

The kernels rotate queries, and the output back, where a rotation is signs and a Hadamard transform; operations do it where it
is a matrix. A row's output depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.cuda import spans
from vlm_batch.adapters.cuda.coding import books, has_lanes
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
from vlm_batch.adapters.cuda.spans import MaskForm
from vlm_batch.caches.codebooks import scaled_signs
from vlm_batch.caches.turbo import TurboLayout, TurboStates
from vlm_batch.runtime.device import Device, device

#: Widths of heads are multiples of this, so that a head's words lie together.
STEP = 32
#: The largest allowed error against attention over the same numbers, in the values' unit, beside what the output's type rounds.
TOLERANCE = 1e-3


def _coded(what: str, bits: str, book: str) -> str:
    views = [
        f"{{{name}, {name}_strides[0], {name}_strides[1], {name}_strides[2]}}"
        for name in (f"{what}_codes", f"{what}_norms")
    ]
    kind = f"few_bits::Coded<S, {bits}>"
    return f"const {kind} {what} = {{{', '.join(views)}, {book}}};"


#: The books are seen by all threads after the first barrier of ``attend_span``.
_VIEWS = f"""
  constexpr int NUMBERS_K = 1 << BITS_K, NUMBERS = NUMBERS_K + (1 << BITS_V);
  __shared__ float book[NUMBERS];
  for (int i = threadIdx.x; i < NUMBERS; i += few_bits::THREADS) book[i] = books[i];
  {_coded("keys", "BITS_K", "book")}
  {_coded("values", "BITS_V", "book + NUMBERS_K")}
"""


_MERGE = """
  const float found = spans::merged<DEPTH, SIDES>(sums, stats, stats_shape[2]);
  turbo::store_turned_back<T, DEPTH>(found, signs, out + (long long)blockIdx.x * DEPTH);
"""


class TurnedBuild(NamedTuple):
    """The facts that a kernel is built for."""

    heads: int  # of queries
    kv_heads: int
    keys: TurboLayout
    values: TurboLayout
    dtype: mx.Dtype  # of queries and the output
    mask: MaskForm

    @property
    def turns(self) -> bool:
        """Whether the kernels rotate."""
        return all(map(has_lanes, (self.keys, self.values)))


@lru_cache(maxsize=2)
def span_kernel(*, turns: bool) -> Kernel:
    parts = ("norms", "codes")
    if not turns:
        return spans.span_kernel("turned", parts, _VIEWS, 1.0, ["books"])
    return spans.span_kernel(
        "turning",
        parts,
        _VIEWS,
        1.0,
        ["books", "signs"],
        turn="turbo::Turned{signs}",
        uses=("masks", "turbo"),
    )


@lru_cache(maxsize=1)
def merge_kernel() -> Kernel:
    inputs = ("sums", "stats", "signs")
    return kernel("turbo", "merge", inputs, ("out",), _MERGE, uses=("spans",))


@lru_cache(maxsize=256)
def launches_of(build: TurnedBuild, rows: int, columns: int) -> tuple[Launch, Launch]:
    keys, values = build.keys, build.values
    spanning = spans.span_launch(
        span_kernel(turns=build.turns),
        {"S": mx.float16, "BITS_K": keys.bits, "BITS_V": values.bits},
        (build.heads, build.kv_heads),
        (keys.depth, values.depth),
        build.dtype if build.turns else mx.float32,
        build.mask,
        (rows, columns),
    )
    if not build.turns:
        return spanning, merging(mx.float32, rows, build.heads, values.depth)
    plain = merging(build.dtype, rows, build.heads, values.depth)
    return spanning, replace(plain, kernel=merge_kernel())


def attend_where_right(
    queries: mx.array, keys: TurboStates, values: TurboStates, scale: float, mask: Any
) -> mx.array | None:
    """Run ``attend`` if the kernel supports these arrays accurately here, else return None."""
    if device() is not Device.CUDA:
        return None
    if not spans.fits_mask(mask, len(queries), keys.shape[2]):
        return None
    build = build_of(queries, keys, values, mask)
    if not is_served(build) or not _is_right(build):
        return None
    return attend(queries, keys, values, scale, mask, on_device)


def attend(
    queries: mx.array,
    keys: TurboStates,
    values: TurboStates,
    scale: float,
    mask: Any,
    run: Run,
) -> mx.array:
    """Attend with queries (B, H, 1, D): (B, H, 1, D_v).

    Args:
        mask: (B or 1, 1, 1, C), bool or additive; None or "causal" hides nothing. Hidden columns are not read.
        run: Runs a launch.
    """
    build = build_of(queries, keys, values, mask)
    spanning, last = launches_of(build, len(queries), keys.shape[2])
    if not build.turns:
        queries = build.keys.rotated(queries, scale)
    shown = queries if build.mask.dtype is None else mask
    given = [queries, *keys.parts, *values.parts, books(build.keys, build.values)]
    if not build.turns:
        output = run(last, run(spanning, [*given, shown]))[0]
        return build.values.restored(output).astype(build.dtype)
    signs = scaled_signs(build.keys.depth, build.keys.seed, scale)
    sums, stats = run(spanning, [*given, signs, shown])
    return run(last, [sums, stats, build.values.turn])[0]


def build_of(
    queries: mx.array, keys: TurboStates, values: TurboStates, mask: Any
) -> TurnedBuild:
    return TurnedBuild(
        queries.shape[1],
        keys.shape[1],
        keys.layout,
        values.layout,
        queries.dtype,
        MaskForm.of(mask),
    )


@lru_cache(maxsize=64)
def is_served(build: TurnedBuild) -> bool:
    """Whether the kernels are written for a build."""
    depths, mask = (build.keys.depth, build.values.depth), build.mask.dtype
    needs = (
        all(depth % STEP == 0 and depth <= spans.WIDEST for depth in depths),
        build.heads % build.kv_heads == 0,
        build.dtype in spans.TYPES,
        mask is None or mask in (mx.bool_, *spans.TYPES),
    )
    return all(needs)


@lru_cache(maxsize=64)
def _is_right(build: TurnedBuild) -> bool:
    return is_right(
        lambda: farthest(build, on_device),
        TOLERANCE + 2 * mx.finfo(build.dtype).eps,
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
    queries, coded_keys, coded_values, mask = example(build, lengths, columns, seed)
    scale = build.keys.depth**-0.5
    found = attend(queries, coded_keys, coded_values, scale, mask, run)
    seen = build.mask.seen(lengths, columns)
    keys, values = (
        states.layout.restored(states.directions() * states.norms)
        for states in (coded_keys, coded_values)
    )
    return error_of(found, queries, keys, values, scale, seen)


def example(
    build: TurnedBuild, lengths: Sequence[int], columns: int, seed: int
) -> tuple[mx.array, TurboStates, TurboStates, mx.array | None]:
    """Return random queries, keys, values and a mask; norms behind rows are NaN."""
    random = np.random.RandomState(seed)
    rows = len(lengths)
    behind = spans.behind_rows(build.mask.seen(lengths, columns), columns)

    def states(layout: TurboLayout) -> TurboStates:
        shape = (rows, build.kv_heads, columns, layout.depth)
        coded = layout.code(mx.array(random.standard_normal(shape).astype(np.float32)))
        nothing = mx.array(mx.nan, mx.float16)
        norms = mx.where(behind[:, None, :, None], nothing, coded.norms)
        return coded._replace(norms=norms)

    keys, values = states(build.keys), states(build.values)
    size = (rows, build.heads, 1, build.keys.depth)
    queries = mx.array(random.standard_normal(size) * 2).astype(build.dtype)
    return queries, keys, values, build.mask.example(behind)
