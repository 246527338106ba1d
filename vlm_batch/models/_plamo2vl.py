"""Replacement modules for PLaMo 2.1 VL."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.plamo2vl.language import Attention, Mamba

from vlm_batch.adapters.attention import attention
from vlm_batch.adapters.recurrent import in_order


class RowAttention(Attention):
    """mlx-vlm calls ``mx.fast`` itself, which knows no rows (plamo2vl/language.py:262)."""

    def __call__(
        self, hidden_states: mx.array, mask: Any = None, cache: Any = None
    ) -> mx.array:
        heads, kv_heads = self.q_num_heads, self.k_num_heads
        split = self.qkv_proj(hidden_states).reshape(
            *hidden_states.shape[:2], heads + 2 * kv_heads, self.qk_dim
        )
        queries, keys, values = mx.split(
            split.swapaxes(1, 2), [heads, heads + kv_heads], axis=1
        )
        queries = mx.fast.rms_norm(queries, None, 1e-6) * self.q_weight[:, None]
        keys = mx.fast.rms_norm(keys, None, 1e-6) * self.k_weight[:, None]
        queries, keys = (
            self.rope(rotated, offset=cache.offset) for rotated in (queries, keys)
        )
        keys, values = cache.update_and_fetch(keys, values)
        output = attention(queries, keys, values, cache, self.scale, mask)
        return self.o_proj(output.swapaxes(1, 2).flatten(-2))


PATCHES: dict[type, type] = {
    Attention: RowAttention,
    Mamba: in_order(Mamba, ("in_proj",), "out_proj"),
}
