"""Masks of attention, and what else all layers of a step share: made once while an array lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.hooks import this_thread

#: Results of ``once``, by function, array, thread and settings.
_made: dict[tuple[Any, ...], Any] = {}


def once(array: mx.array, make: Callable[..., Any], *settings: Any) -> Any:
    """Return ``make(array, *settings)``, made once a thread while the array lives.

    Threads share arrays, such as ``lengths_array``, and cannot evaluate each other's results.
    """
    key = (make, id(array), this_thread(), *settings)
    if key not in _made:
        _made[key] = make(array, *settings)
        weakref.finalize(array, _made.pop, key, None).atexit = False
    return _made[key]


def added(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    """Convert a mask to an additive one, once per step."""
    return mask if mask.dtype != mx.bool_ else once(mask, _added, dtype)


def _added(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    return mx.where(mask, mx.array(0, dtype), mx.array(mx.finfo(dtype).min, dtype))


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
