"""Replacement modules for Cohere Compass."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.cohere_compass.language import Attention, DecoderLayer

from vlm_batch.adapters.attention import attention


class RowAttention(Attention):
    """mlx-vlm projects and attends row by row (cohere_compass/language.py:180-300)."""

    def __call__(
        self,
        hidden_states: mx.array,
        mask: Any = None,
        cache: Any = None,
        position_ids: mx.array | None = None,
        position_embeddings: tuple[mx.array, mx.array] | None = None,
    ) -> mx.array:
        batch, length, _ = hidden_states.shape
        queries, keys, values = (
            project(hidden_states)
            .reshape(batch, length, -1, self.head_dim)
            .swapaxes(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if position_embeddings is not None:
            queries, keys = self._apply_precomputed(queries, keys, position_embeddings)
        keys, values = cache.update_and_fetch(keys, values)
        output = attention(queries, keys, values, cache, self.scale, mask)
        return self.o_proj(output.swapaxes(1, 2).flatten(-2))


class RowLayer(DecoderLayer):
    """mlx-vlm runs the MLP row by row (cohere_compass/language.py:364)."""

    def __call__(
        self,
        x: mx.array,
        mask: Any,
        cache: Any,
        position_ids: Any,
        position_embeddings: Any,
    ) -> Any:
        normed = self.input_layernorm(x)
        attended = x + self.self_attn(
            normed, mask, cache, position_ids, position_embeddings
        )
        if self.is_parallel:
            return attended + self.mlp(normed)
        return attended + self.mlp(self.post_attention_layernorm(attended))

    @property
    def is_parallel(self) -> bool:
        return "post_attention_layernorm" not in self


PATCHES: dict[type, type] = {Attention: RowAttention, DecoderLayer: RowLayer}
