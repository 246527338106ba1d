"""Replacement modules for Moondream 3."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.moondream3.language import Attention
from mlx_vlm.models.moondream3.vision import VisionModel

from vlm_batch.adapters.attention import attention
from vlm_batch.models.moondream2 import AdaptivePooling


class RowAttention(Attention):
    """mlx-vlm reads offsets back and rotates row by row (moondream3/language.py:116-137)."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        length = x.shape[1]
        qkv = self.qkv(x)  # (B, L, (H + 2 H_kv) * D_head)
        offset = cache.offset  # an int, or (B,)
        start = offset[:, None] if isinstance(offset, mx.array) else offset
        tau_q, tau_v = self.tau(qkv, start + mx.arange(length))  # (B, H, L, 1)
        heads, kv_heads = self.n_heads, self.n_kv_heads
        split = qkv.reshape(
            *qkv.shape[:2], heads + 2 * kv_heads, self.head_dim
        ).swapaxes(1, 2)
        # (B, H, L, D_head)
        queries, keys, values = mx.split(split, [heads, heads + kv_heads], axis=1)
        queries = self.rope(queries * tau_q, offset=offset)
        keys, values = cache.update_and_fetch(
            self.rope(keys, offset=offset), values * tau_v
        )
        output = attention(queries, keys, values, cache, self.scale, mask)
        return self.proj(output.swapaxes(1, 2).flatten(-2))


class Tower(AdaptivePooling, VisionModel):
    """The tower with published pooling of crops."""


PATCHES: dict[type, type] = {Attention: RowAttention, VisionModel: Tower}
