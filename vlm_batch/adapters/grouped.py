"""One query over heads that share keys: a mask for each key head, or an array of masks, with the heads as rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from vlm_batch.adapters.once import added


def is_groupable(queries: mx.array, keys: mx.array, mask: Any) -> bool:
    is_masked = (
        isinstance(mask, mx.array)
        and mask.ndim == 4
        and mask.shape[1] in (1, keys.shape[1])
    )
    return (
        is_masked
        and mask.shape[2] == queries.shape[2] == 1
        and queries.shape[1] > keys.shape[1]
    )


def attend_groups(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array
) -> mx.array:
    """Attend with queries (B, H, 1, D) and mask (B, 1 or H_kv, 1, K), grouped by shared keys."""
    batch, heads, _, width = queries.shape
    kv_heads, columns = keys.shape[1], keys.shape[2]
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads, width)
    wide = mx.broadcast_to(
        added(mask, queries.dtype), (batch, mask.shape[1], heads // kv_heads, columns)
    )
    attended = mx.fast.scaled_dot_product_attention(
        grouped, keys, values, scale=scale, mask=wide
    )
    return attended.reshape(batch, heads, 1, -1)
