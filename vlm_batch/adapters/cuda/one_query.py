"""Decode attention over slabs on CUDA (``one_query.cu``).

MLX 0.32 attends with an array of masks in five operations in float32, and through cuDNN in half precision, which takes 2.5
to 7 times as long as without a mask (docs/log.md). Last bits depend on the slab's columns and rows, so a fixed ``Call`` does
without.
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

#: Equal to the constant of ``one_query.cu``.
THREADS = 128
#: Bytes that a thread loads at once.
PACK = 16
#: Numbers of queries that a thread holds for its heads.
MOST_NUMBERS = 32
WIDEST = 256
#: Columns that one block reads, and the fewest and most of several, which are cut until there are ``BLOCKS`` of them. One
#: row may be long where all others are short.
ONE_BLOCK = 256
FEWEST = 128
MOST = 1024
BLOCKS = 1024
TYPES = (mx.float32, mx.bfloat16, mx.float16)
#: The largest allowed error against exact attention, in the values' unit.
TOLERANCE = 0.02

_INPUTS = ("queries", "keys", "values", "mask")


class OneQueryBuild(NamedTuple):
    """The facts that a kernel is built for."""

    scale: float
    heads: int  # query heads
    kv_heads: int
    depth: int
    dtype: mx.Dtype
    mask: mx.Dtype


@lru_cache(maxsize=16)
def _kernel(scale: float) -> Kernel:
    views = "\n".join(
        f"  const one_query::View<T> of_{name} = "
        f"{{{name}, {name}_strides[0], {name}_strides[1], {name}_strides[2], {name}_strides[3]}};"
        for name in ("queries", "keys", "values")
    )
    body = f"""
{views}
  one_query::attend<T, M, DEPTH, SHARE, HEADS>(
      of_queries, of_keys, of_values, mask, mask_shape[0] > 1 ? mask_strides[0] : 0, mask_strides[3], keys_shape[2], {scale!r}f,
      out, sums, stats);
"""
    return kernel(
        "one_query", "attend", _INPUTS, ("out", "sums", "stats"), body, uses=("masks",)
    )


@lru_cache(maxsize=256)
def launches_of(build: OneQueryBuild, rows: int, columns: int) -> tuple[Launch, ...]:
    share, size = build.heads // build.kv_heads, PACK // build.dtype.size
    lanes = min(32, 1 << max(0, (build.depth // size - 1).bit_length()))
    numbers = size * -(-(build.depth // size) // lanes)
    heads = min(share, max(1, MOST_NUMBERS // numbers))
    tiles = -(-share // heads)
    blocks = rows * build.kv_heads * tiles
    wanted = max(-(-BLOCKS // blocks), -(-columns // MOST))
    spans = 1 if columns <= ONE_BLOCK else min(-(-columns // FEWEST), wanted)
    template = {
        "T": build.dtype,
        "M": build.mask,
        "DEPTH": build.depth,
        "SHARE": share,
        "HEADS": -(-share // tiles),
    }
    whole, part = (rows, build.heads, 1, build.depth), (rows, build.heads, spans)
    first = Launch(
        _kernel(build.scale),
        tuple(template.items()),
        (THREADS * spans, build.kv_heads * tiles, rows),
        (THREADS, 1, 1),
        (whole, (1,), (1,)) if spans == 1 else ((1,), (*part, build.depth), (*part, 2)),
        (build.dtype, mx.float32, mx.float32),
    )
    return (
        (first,)
        if spans == 1
        else (first, merging(build.dtype, rows, build.heads, build.depth))
    )


def attend_where_right(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
) -> mx.array | None:
    """Run ``attend`` if the kernels support these arrays accurately here, else return None."""
    if not is_served(queries, keys, values, mask):
        return None
    if not _is_right(_build_of(queries, keys, scale, mask)):
        return None
    return attend(queries, keys, values, scale, mask, on_device)


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array,
    run: Run,
) -> mx.array:
    """Attend with queries (B, H, 1, D) over keys and values (B, H_kv, C, D): (B, H, 1, D).

    Args:
        mask: (B or 1, 1, 1, C), bool or additive. Hidden columns are not read; a row that sees none gets zeros.
        run: Runs a launch.
    """
    first, *rest = launches_of(
        _build_of(queries, keys, scale, mask), queries.shape[0], keys.shape[2]
    )
    answer, *parts = run(first, [queries, keys, values, mask])
    return run(rest[0], parts)[0] if rest else answer


def _build_of(
    queries: mx.array, keys: mx.array, scale: float, mask: mx.array
) -> OneQueryBuild:
    _, heads, _, depth = queries.shape
    return OneQueryBuild(
        float(scale), heads, keys.shape[1], depth, queries.dtype, mask.dtype
    )


def is_served(queries: mx.array, keys: mx.array, values: mx.array, mask: Any) -> bool:
    """Whether the kernels are written for these arrays."""
    if not isinstance(mask, mx.array):
        return False
    if not queries.ndim == keys.ndim == mask.ndim == 4:
        return False
    rows, heads, _, depth = queries.shape
    kv_heads, columns = keys.shape[1], keys.shape[2]
    needs = (
        queries.shape[2] == 1,
        keys.shape == values.shape == (rows, kv_heads, columns, depth),
        heads % kv_heads == 0,
        depth <= WIDEST,
        depth * queries.dtype.size % PACK == 0,
        mask.shape[0] in (1, rows),
        mask.shape[1:] == (1, 1, columns),
        queries.dtype == keys.dtype == values.dtype,
        queries.dtype in TYPES,
        mask.dtype in (mx.bool_, *TYPES),
    )
    return all(needs)


@lru_cache(maxsize=64)
def _is_right(build: OneQueryBuild) -> bool:
    def worst() -> float:
        return float(
            np.max(
                [
                    farthest(build, on_device, columns=columns)
                    for columns in (ONE_BLOCK, 2 * ONE_BLOCK)
                ]
            )
        )

    return is_right(
        worst,
        TOLERANCE,
        "decode steps attend by MLX's operations: the kernel for one query",
    )


def farthest(
    build: OneQueryBuild,
    run: Run,
    lengths: Sequence[int] = (200, 131),
    columns: int = ONE_BLOCK,
    seed: int = 0,
    *,
    is_shared: bool = False,
) -> float:
    """Return the largest error against exact attention over random rows with NaN behind them.

    Args:
        is_shared: All rows have the first one's length, and share its mask.
    """
    lengths = [lengths[0]] * len(lengths) if is_shared else lengths
    queries, keys, values, mask = example(build, lengths, columns, seed)
    mask = mask[:1] if is_shared else mask
    found = attend(queries, keys, values, build.scale, mask, run)
    return error_of(found, queries, keys, values, build.scale, lengths)


def error_of(
    found: mx.array,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    lengths: Sequence[int],
) -> float:
    """Return the largest error of attention over each row's first columns, of ``lengths``; NaN if any is."""
    share, errors = queries.shape[1] // keys.shape[1], []
    for row, length in enumerate(lengths):
        seen = [
            mx.repeat(one[row, :, :length].astype(mx.float32), share, axis=0)
            for one in (keys, values)
        ]
        scores = queries[row].astype(mx.float32) * scale @ seen[0].swapaxes(-1, -2)
        right = mx.softmax(scores, axis=-1) @ seen[1]
        errors.append(
            np.abs(np.array(found[row].astype(mx.float32)) - np.array(right)).max()
        )
    return float(np.max(errors))


def example(
    build: OneQueryBuild, lengths: Sequence[int], columns: int, seed: int
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    random = np.random.RandomState(seed)
    rows = len(lengths)
    # (B, 1, C)
    behind = mx.array(np.arange(columns)[None] >= np.array(lengths)[:, None])[:, None]

    def slab() -> mx.array:
        array = mx.array(
            random.standard_normal((rows, build.kv_heads, columns, build.depth)).astype(
                np.float32
            )
        )
        return mx.where(behind[..., None], mx.nan, array).astype(build.dtype)

    keys, values = slab(), slab()
    scale = 2 / (build.scale * build.depth**0.5)  # scores of a few units
    queries = mx.array(
        (random.standard_normal((rows, build.heads, 1, build.depth)) * scale).astype(
            np.float32
        )
    )
    hidden, kind = behind[:, None], build.mask
    mask = (
        ~hidden
        if kind == mx.bool_
        else mx.where(hidden, mx.array(mx.finfo(kind).min, kind), mx.array(0, kind))
    )
    return queries.astype(build.dtype), keys, values, mask
