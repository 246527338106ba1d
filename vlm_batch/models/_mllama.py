"""Replacement modules for Llama 3.2 Vision."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import cache_position_offset
from mlx_vlm.models.mllama import language as upstream

from vlm_batch.adapters.attention import attention


def _heads(projected: mx.array, head_dim: int) -> mx.array:
    """(B, L, H * D_head) -> (B, H, L, D_head)."""
    return projected.reshape(*projected.shape[:2], -1, head_dim).swapaxes(1, 2)


class RowSelfAttention(upstream.MllamaTextSelfAttention):
    """mlx-vlm rotates all rows by one column (mllama/language.py:150)."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        queries, keys, values = (
            _heads(p(x), self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = (
            self.rope(rotated, offset=cache.offset) for rotated in (queries, keys)
        )
        keys, values = cache.update_and_fetch(keys, values)
        output = attention(queries, keys, values, cache, self.scale, mask)
        return self.o_proj(output.swapaxes(1, 2).flatten(-2))


class RowCrossAttention(upstream.MllamaTextCrossAttention):
    """Keeps keys and values, which mlx-vlm does not (mllama/language.py:67-79)."""

    def __call__(
        self,
        hidden_states: mx.array,
        cross_attention_states: mx.array | None = None,
        attention_mask: mx.array | None = None,
        cache: Any = None,
    ) -> mx.array:
        if (states := cross_attention_states) is not None:
            keys, values = (
                _heads(project(states), self.head_dim)
                for project in (self.k_proj, self.v_proj)
            )
            cache.hold(self.k_norm(keys), values)
        queries = self.q_norm(_heads(self.q_proj(hidden_states), self.head_dim))
        keys, values = cache.state
        output = attention(queries, keys, values, cache, self.scale, attention_mask)
        return self.o_proj(output.swapaxes(1, 2).flatten(-2))


class SkippingLayer(upstream.MllamaCrossAttentionDecoderLayer):
    """Skips texts, as transformers (:1128); mlx-vlm does not (mllama/language.py:336)."""

    def __call__(
        self,
        hidden_states: mx.array,
        cross_attention_states: mx.array | None,
        attention_mask: mx.array | None = None,
        full_text_row_masked_out_mask: mx.array | None = None,
        cache: Any = None,
    ) -> mx.array:
        if cross_attention_states is None and not cache_position_offset(cache):
            return hidden_states
        return super().__call__(
            hidden_states,
            cross_attention_states,
            attention_mask,
            full_text_row_masked_out_mask,
            cache,
        )


PATCHES: dict[type, type] = {
    upstream.MllamaTextSelfAttention: RowSelfAttention,
    upstream.MllamaTextCrossAttention: RowCrossAttention,
    upstream.MllamaCrossAttentionDecoderLayer: SkippingLayer,
}
