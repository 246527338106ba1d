"""Attention of decode steps in float32 on a CPU, by powers of e.

In float32, MLX 0.32's exponentials and selections cost more than powers (docs/log.md). So steps use powers of e and
additive masks. Heads that share keys become rows of one product. Prompts and towers attend with numpy's exponentials
where those are faster (``by_numpy``); decode steps, which may be graphs, cannot.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from vlm_batch.adapters import by_numpy
from vlm_batch.adapters.masks import added
from vlm_batch.caches.quantized import QuantizedStates

#: The most scores of a decode step over a slab for which fewer operations beat powers.
FEW_SCORES = 2**13
#: The fewest keys for which a single query gains from powers, if no heads share keys.
MANY_KEYS = 512
E = math.e
#: Bit widths that divide a byte.
CODES_OF_BYTES = (2, 4, 8)
#: The fewest heads per key head for which ``attend_codes`` pays.
FEW_HEADS = 4
#: The fewest numbers read by all heads for which ``attend_codes`` pays.
MANY_CODES = 2**20


def takes_powers(array: mx.array) -> bool:
    """Whether an array's exponentials are powers of e: in float32, on a CPU."""
    is_cpu = mx.default_device().type == mx.DeviceType.cpu
    return array.dtype == mx.float32 and is_cpu


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
) -> mx.array:
    """Compute ``mx.fast.scaled_dot_product_attention`` of arrays that ``takes_powers``, by powers where they gain."""
    num_queries = queries.size // queries.shape[3]
    if isinstance(mask, mx.array):
        is_of_slab = mask.ndim == 4 and mask.shape[1:3] == (1, 1)
        if is_of_slab:
            mask = added(mask, queries.dtype)
        is_gain = is_of_slab and num_queries * keys.shape[2] > FEW_SCORES
    else:
        is_gain = queries.shape[1] > keys.shape[1] or keys.shape[2] >= MANY_KEYS
    is_step = queries.shape[2] == 1
    if is_step and is_gain and not by_numpy.takes_attention(queries, keys):
        return attend_step(queries, keys, values, scale, mask)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask
    )


def attend_step(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
) -> mx.array:
    """Attend with queries (B, H, 1, D); ``mask`` is a slab's, or hides nothing."""
    batch, heads, _, width = queries.shape
    # (B, H_kv, G, D)
    grouped = (queries * scale).reshape(batch, keys.shape[1], -1, width)
    scores = grouped @ keys.swapaxes(-1, -2)
    if isinstance(mask, mx.array):
        scores = scores + added(mask, scores.dtype)
    weights = mx.power(E, scores - scores.max(axis=-1, keepdims=True))
    attended = (weights @ values) / weights.sum(axis=-1, keepdims=True)
    return attended.reshape(batch, heads, 1, -1)


def takes_codes(queries: mx.array, keys: QuantizedStates, mask: Any) -> bool:
    """Whether ``attend_codes`` takes queries (B, H, L, D) over packed keys, and gains."""
    if isinstance(mask, mx.array) or queries.shape[2] > 1:
        return False
    if keys.layout.bits not in CODES_OF_BYTES or not takes_powers(queries):
        return False
    is_shared = queries.shape[1] >= FEW_HEADS * keys.shape[1]
    is_much = queries.size * keys.shape[2] >= MANY_CODES
    return is_shared and is_much


def attend_codes(
    queries: mx.array, keys: QuantizedStates, values: QuantizedStates, scale: float
) -> mx.array:
    """Attend with queries (B, H, 1, D) over packed keys and values: (B, H, 1, D_v).

    A number is ``code * scale + bias`` of its group. So scores are products with codes, scaled, plus biases times the
    query's sums. A query becomes a row per group, zero elsewhere.
    """
    batch, heads, _, depth = queries.shape
    kv_heads, size = keys.shape[1], keys.layout.group_size
    share = heads // kv_heads
    missing = [(0, 0)] * 3 + [(0, -depth % size)]  # pad the last group
    grouped = (queries * scale).reshape(batch, kv_heads, share, depth)
    # (B, G, R, n, g)
    grouped = mx.pad(grouped, missing).reshape(batch, kv_heads, share, -1, size)
    # (B, G, R, n, n, g)
    apart = grouped[..., None, :, :] * mx.eye(grouped.shape[3])[:, :, None]
    apart = apart.flatten(-2).flatten(2, 3)
    planes = _planes(keys)
    found: Any = 0
    for i, plane in enumerate(planes):
        found = found + apart[..., i :: len(planes)] @ plane.swapaxes(-1, -2)
    # (B, G, n, K)
    scales = keys.scales.swapaxes(-1, -2)
    biases = keys.biases.swapaxes(-1, -2)
    by_group = found.reshape(*grouped.shape[:4], -1) * scales[:, :, None]
    scores = by_group.sum(axis=3) + grouped.sum(axis=-1) @ biases
    weights = mx.power(E, scores - scores.max(axis=-1, keepdims=True))
    attended = _weighted(values, weights) / weights.sum(axis=-1, keepdims=True)
    return attended[..., : values.layout.depth].reshape(batch, heads, 1, -1)


def _weighted(values: QuantizedStates, weights: mx.array) -> mx.array:
    """Sum packed values (B, G, K, D_v) by weights (B, G, R, K)."""
    batch, kv_heads, rows, columns = weights.shape
    scales = values.scales.swapaxes(-1, -2)  # (B, G, n, K)
    count = scales.shape[2]
    scaled = weights[:, :, :, None] * scales[:, :, None]
    scaled = scaled.reshape(batch, kv_heads, -1, columns)
    own = []
    for plane in _planes(values):
        found = (scaled @ plane).reshape(batch, kv_heads, rows, count, count, -1)
        # each group by its own scales
        own.append((found * mx.eye(count)[:, :, None]).sum(axis=3))
    products = mx.stack(own, axis=-1).flatten(-2)
    return (products + (weights @ values.biases)[..., None]).flatten(-2)


def _planes(states: QuantizedStates) -> list[mx.array]:
    """Return float codes; with ``p`` a byte, array ``i`` holds numbers i, i + p, ..."""
    packed, bits = states.packed.view(mx.uint8), states.layout.bits
    if bits == 8:
        return [packed.astype(mx.float32)]
    codes = ((packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits))
    return [one.astype(mx.float32) for one in codes]
