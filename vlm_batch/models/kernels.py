"""Which of MLX's attention kernels a call takes on CUDA: the same numbers at another price (docs/benchmarks.md).

MLX 0.32 runs half-precision attention through cuDNN, which makes a plan for every new shape of queries and keys, strides
included (mlx/backend/cuda/scaled_dot_product_attention.cpp, ``build_sdpa_cache_key``): 20-80 ms each. Prompts are of all
lengths, so a shape gets a plan here only when it keeps coming back; until then its attention is spelled out. And a single
query with an array as mask has no kernel there; the queries of one group of heads, taken as several queries, have.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx

#: Calls of a shape before it is given a plan: about 30 forwards of 36 layers, whose price is that of one plan.
USES_BEFORE_PLAN = 1024
#: The most scores (B, H, L, K) that are spelled out, in elements.
MAX_SCORES = 2**27
MAX_SHAPES = 8192

_uses: Counter[tuple[Any, ...]] = Counter()


def takes_plans(queries: mx.array) -> bool:
    """Whether MLX would run this attention through cuDNN."""
    is_half = queries.dtype in (mx.float16, mx.bfloat16)
    return is_half and queries.shape[-1] <= 128 and mx.cuda.is_available() and mx.default_device() == mx.Device(mx.gpu)


def attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any = None) -> mx.array:
    """``mx.fast.scaled_dot_product_attention`` of (B, H, L, D) queries over (B, H_kv, K, D) keys, by the cheaper way."""
    if takes_plans(queries):
        if is_groupable(queries, keys, mask):
            return attend_groups(queries, keys, values, scale, mask)
        if queries.shape[2] > 1 and is_rare(queries, keys):
            return attend_spelled_out(queries, keys, values, scale, mask)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def is_rare(queries: mx.array, keys: mx.array) -> bool:
    """Whether a shape has come too seldom for a plan, and is small enough to do without; counts it."""
    batch, heads, length, _ = queries.shape
    if batch * heads * length * keys.shape[2] > MAX_SCORES:
        return False
    shape = (queries.shape, keys.shape)
    if len(_uses) > MAX_SHAPES:
        _uses.clear()
    _uses[shape] += 1
    return _uses[shape] <= USES_BEFORE_PLAN


def attend_spelled_out(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any) -> mx.array:
    """Attention as products and a softmax in float32: (B, H, L, D_v). ``mask`` is None, "causal", or an array."""
    batch, heads, length, width = queries.shape
    kv_heads, columns = keys.shape[1], keys.shape[2]
    grouped = (queries * scale).reshape(batch, kv_heads, -1, width)  # a group's heads one after another: (B, H_kv, G L, D)
    scores = (grouped @ keys.swapaxes(-1, -2)).reshape(batch, heads, length, columns)
    if isinstance(mask, str):
        mask = mx.arange(columns)[None] <= mx.arange(columns - length, columns)[:, None]
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min) if mask.dtype == mx.bool_ else scores + mask
    weights = mx.softmax(scores, axis=-1, precise=True).reshape(batch, kv_heads, -1, columns)
    return (weights @ values).reshape(batch, heads, length, -1)


def is_groupable(queries: mx.array, keys: mx.array, mask: Any) -> bool:
    """Whether there is one query a row, with a mask that is the same for all heads, and several heads share their keys."""
    is_masked = isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[1:3] == (1, 1)
    return is_masked and queries.shape[2] == 1 and queries.shape[1] > keys.shape[1]


def attend_groups(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array) -> mx.array:
    """One query a row (B, H, 1, D) with a mask (B, 1, 1, K): the heads that share keys become queries of one head."""
    batch, heads, _, width = queries.shape
    kv_heads, columns = keys.shape[1], keys.shape[2]
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads, width)
    wide = mx.broadcast_to(mask, (batch, 1, heads // kv_heads, columns))
    if mask.dtype == mx.bool_:
        zero = mx.array(0, queries.dtype)
        wide = mx.where(wide, zero, mx.array(mx.finfo(queries.dtype).min, queries.dtype))
    attended = mx.fast.scaled_dot_product_attention(grouped, keys, values, scale=scale, mask=wide)
    return attended.reshape(batch, heads, 1, -1)
