"""Attention of prompts and towers in half precision, where cuDNN plans each shape.

cuDNN makes a plan for every new shape and strides (mlx/backend/cuda/scaled_dot_product_attention.cpp,
``build_sdpa_cache_key``). A shape gets a plan once it recurs, in a warm-up, or if its scores take too much memory.
Otherwise attention is products and a softmax, so last bits depend on earlier calls; a fixed ``Call`` goes by shapes alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.cuda import one_query
from vlm_batch.adapters.hooks import current, this_thread
from vlm_batch.adapters.masks import attend_groups, is_groupable
from vlm_batch.arrays import joined

#: Calls of a shape before it gets a plan; a plan pays off after about 30 forwards of 36 layers.
USES_BEFORE_PLAN = 1024
#: A count beyond every threshold.
OFTEN = 2**32
#: The most scores (B * H * L * K) of attention that is computed without a plan.
MAX_SCORES = 2**22
MAX_SHAPES = 8192
#: Numbers that a tower's attention of one shape handles before it gets a plan: scores, and ``NUMBERS_OF_PATCH`` times a
#: patch's values.
NUMBERS_BEFORE_PLAN = 2**33
NUMBERS_OF_PATCH = 6
#: The factor by which a picture's exact length waits longer for a plan if its padded length has one.
FILLED_TIMES = 6
#: The smallest steps between padded lengths of pictures.
LENGTH_STEP = 64
#: The most scores of a tower in memory at a time, without a plan.
BLOCK_SCORES = 2**26
#: The most scores of a prompt in memory at a time, without a plan.
PROMPT_SCORES = 2**23
#: The most scores of a prompt without a plan: ten launched layers take about 4 GB.
MAX_PROMPT_SCORES = 2**26
#: The most keys at which scores take about as much memory as queries.
FEW_KEYS = 128

#: cuBLAS's fast half-precision kernels read 16 bytes, so widths are padded to multiples of 8.
FAST_WIDTH = 8
#: The widest head that cuDNN's attention takes.
WIDEST = 128

_uses: Counter[tuple[Any, ...]] = Counter()
#: Padded shapes (B, H, L, D) of pictures' attention that have plans.
_filled: set[tuple[int, ...]] = set()


def takes_plans(queries: mx.array) -> bool:
    """Whether MLX runs attention of these queries through cuDNN."""
    is_half = queries.dtype in (mx.float16, mx.bfloat16)
    return is_half and queries.shape[-1] <= WIDEST


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
) -> mx.array:
    """Compute ``mx.fast.scaled_dot_product_attention`` on CUDA the fastest way."""
    is_fixed, is_one = current().is_fixed, queries.shape[2] == 1
    if is_one and not is_fixed:
        found = one_query.attend_where_right(queries, keys, values, scale, mask)
        if found is not None:
            return found
    if not takes_plans(queries):
        return _attend_fast(queries, keys, values, scale, mask)
    if is_groupable(queries, keys, mask):
        return attend_groups(queries, keys, values, scale, mask)
    if is_fixed:
        if is_unfused(queries, keys, mask):
            return attend_unfused(queries, keys, values, scale, mask)
        return _attend_fast(queries, keys, values, scale, mask)
    if is_one:
        return _attend_fast(queries, keys, values, scale, mask)
    if is_rare(queries, keys):
        return attend_unfused(queries, keys, values, scale, mask)
    if isinstance(mask, str) and is_early(queries, keys):
        return attend_before(queries, keys, values, scale)
    return _attend_fast(queries, keys, values, scale, mask)


def _attend_fast(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
) -> mx.array:
    """Attend by MLX's own choice of a kernel."""
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask
    )


def attend_all(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float
) -> mx.array:
    """Attend without a mask among a picture's patches (B, H, L, D), of a type that ``takes_plans``."""
    is_large = keys.shape[2] > FEW_KEYS and not is_small(queries[:1], keys[:1])
    if is_large and len(queries) > 1:
        # Large pictures run one by one, so that one plan serves any number of them.
        rows = zip(queries[:, None], keys[:, None], values[:, None], strict=True)
        return mx.concatenate([attend_all(*row, scale) for row in rows])
    length = planned_length(queries.shape)
    if length is None:
        return attend_by_queries(queries, keys, values, scale)
    return attend_filled(queries, keys, values, length, scale)


def planned_length(shape: tuple[int, ...]) -> int | None:
    """Count a shape (B, H, L, D); return its own or a padded length with a plan, or None."""
    batch, heads, length, width = shape
    filled = few_from(length, LENGTH_STEP) if length > FEW_KEYS else length
    if current().is_fixed:
        is_light = batch * heads * length**2 <= MAX_SCORES or length <= FEW_KEYS
        return None if is_light else filled
    few = (batch, heads, filled, width)
    is_own = not is_new(shape, times=FILLED_TIMES if few in _filled else 1)
    is_filled = not is_new(few, True)
    if is_own:
        return length
    if not is_filled:
        return None
    _filled.add(few)
    return filled


def attend_filled(
    queries: mx.array, keys: mx.array, values: mx.array, length: int, scale: float
) -> mx.array:
    """Attend without a mask among (B, H, L, D), padded to ``length``."""
    batch, heads, own, width = queries.shape
    if own == length:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)
    # along the patches, in memory order
    fill = [(0, 0), (0, length - own), (0, 0), (0, 0)]
    parts = [mx.pad(part.swapaxes(1, 2), fill) for part in (queries, keys, values)]
    mask = None
    if width + FAST_WIDTH <= WIDEST:
        for at, columns in enumerate(columns_of(own, length, queries.dtype)):
            wide = mx.broadcast_to(columns, (batch, length, heads, FAST_WIDTH))
            parts[at] = mx.concatenate([parts[at], wide], axis=-1)
    else:
        mask = mask_of((own,) * batch, length, queries.dtype)
    queries, keys, values = (part.swapaxes(1, 2) for part in parts)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask
    )[:, :, :own]


@lru_cache(maxsize=32)
def columns_of(own: int, filled: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Return extra columns (1, L, 1, 8) of queries and keys that mask all but the first ``own`` keys.

    No MLX operation makes them, so any thread may use them.
    """
    queries, keys = np.zeros((2, 1, filled, 1, FAST_WIDTH), np.float32)
    queries[..., 0], keys[:, own:, :, 0] = 2.0**10, -(2.0**15)  # within float16's range
    return mx.array(queries, dtype), mx.array(keys, dtype)


@lru_cache(maxsize=256)
def mask_of(lengths: tuple[int, ...], filled: int, dtype: mx.Dtype) -> mx.array:
    """Mask keys beyond ``lengths`` (B,): additive (B, 1, 1, ``filled``), for any thread."""
    is_there = np.arange(filled) < np.array(lengths)[:, None]
    return mx.array(
        np.where(is_there, 0.0, mx.finfo(dtype).min).astype(np.float32)[:, None, None],
        dtype,
    )


def few_from(count: int, step: int) -> int:
    """Round up to a multiple of ``step``, or of an eighth of the power of two below."""
    return -few_to(-count, step)


def few_to(count: int, step: int) -> int:
    step = max(step, 1 << max(0, abs(count).bit_length() - 4))
    return count // step * step


def is_small(queries: mx.array, keys: mx.array) -> bool:
    batch, heads, length, _ = queries.shape
    return batch * heads * length * keys.shape[2] <= MAX_SCORES


def is_unfused(queries: mx.array, keys: mx.array, mask: Any) -> bool:
    """Whether attention runs unfused, without a plan, by shapes alone.

    For one query without an array mask, MLX goes by the keys' layout (``use_cudnn_for_decoding``).
    """
    is_lone = queries.shape[2] == 1 and not isinstance(mask, mx.array)
    return is_lone or is_small(queries, keys)


def is_rare(queries: mx.array, keys: mx.array) -> bool:
    """Count a shape; return whether it is small and too rare for a plan."""
    return (
        is_small(queries, keys)
        and _count((queries.shape, keys.shape)) <= USES_BEFORE_PLAN
    )


def has_plans(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Count the first shape; return whether all of them have plans."""
    return current().is_fixed or not is_new(shapes[0], True, times=len(shapes))


def is_early(queries: mx.array, keys: mx.array) -> bool:
    """Count a prompt's shape; return whether it is too rare for a plan, which larger shapes get sooner."""
    uses = _count((queries.shape, keys.shape))
    batch, heads, length, _ = queries.shape
    scores = batch * heads * length * keys.shape[2]
    return (
        uses <= USES_BEFORE_PLAN
        and uses * scores <= NUMBERS_BEFORE_PLAN
        and scores <= MAX_PROMPT_SCORES
    )


def is_new(shape: tuple[int, ...], is_filled: bool = False, times: int = 1) -> bool:
    """Count a tower's shape (B, H, L, D); return whether it is too rare for a plan that pays ``times`` later."""
    batch, heads, length, width = shape
    numbers = batch * heads * length * (length + NUMBERS_OF_PATCH * width)
    uses = _count((shape, is_filled))
    return (
        uses <= times * USES_BEFORE_PLAN
        and uses * numbers <= times * NUMBERS_BEFORE_PLAN
    )


def _count(shape: tuple[Any, ...]) -> int:
    if len(_uses) > MAX_SHAPES:
        _uses.clear()
        _filled.clear()
    own = (this_thread(), shape)  # MLX keeps plans per thread
    _uses[own] += OFTEN if current().makes_plans else 1
    return _uses[own]


def attend_unfused(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
) -> mx.array:
    """Attend by products and a float32 softmax; ``mask`` is None, "causal" or an array."""
    batch, heads, length, width = queries.shape
    kv_heads, columns = keys.shape[1], keys.shape[2]
    grouped = (queries * scale).reshape(batch, kv_heads, -1, width)  # (B, H_kv, G L, D)
    scores = grouped @ keys.swapaxes(-1, -2)
    scores = scores.reshape(batch, heads, length, columns)
    if isinstance(mask, str):
        mask = _not_later(length, columns)
    if mask is not None:
        scores = _masked(scores, mask)
    weights = mx.softmax(scores, axis=-1, precise=True)
    weights = weights.reshape(batch, kv_heads, -1, columns)
    return (weights @ values).reshape(batch, heads, length, -1)


def _masked(scores: mx.array, mask: mx.array) -> mx.array:
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return scores + mask


def attend_by_queries(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float
) -> mx.array:
    """Attend without a mask by ``attend_unfused``, as many queries at a time as ``BLOCK_SCORES`` has room for."""
    batch, heads, length, _ = queries.shape
    size = max(1, BLOCK_SCORES // (batch * heads * keys.shape[2]))
    parts = []
    for start in range(0, length, size):
        some = queries[:, :, start : start + size]
        parts.append(attend_unfused(some, keys, values, scale, None))
    return joined(parts, axis=2)


def attend_before(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float
) -> mx.array:
    """Attend causally by ``attend_unfused``, over the keys that a block of queries sees."""
    batch, heads, length, _ = queries.shape
    columns = keys.shape[2]
    size = max(1, PROMPT_SCORES // (batch * heads * columns))  # queries at a time
    parts = []
    for start in range(0, length, size):
        seen = columns - length + min(start + size, length)
        some = queries[:, :, start : start + size]
        own_keys, own_values = keys[:, :, :seen], values[:, :, :seen]
        parts.append(attend_unfused(some, own_keys, own_values, scale, "causal"))
    return joined(parts, axis=2)


@lru_cache(maxsize=16)
def _not_later(queries: int, keys: int) -> mx.array:
    """Return the causal mask (l, K) of the last ``queries`` positions."""
    return mx.array(np.arange(keys)[None] <= np.arange(keys - queries, keys)[:, None])
