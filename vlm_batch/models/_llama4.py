"""Replacement modules for Llama 4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import create_attention_mask
from mlx_vlm.models.llama4.language import Attention, LlamaModel, MoE

from vlm_batch.adapters.attention import attention


class RowAttention(Attention):
    """mlx-vlm scales all queries by the farthest row's positions (llama4/language.py:83-101)."""

    norm_eps: float  # of the queries' and keys' norm

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        batch, length, _ = x.shape
        queries, keys, values = (
            project(x).reshape(batch, length, -1, self.head_dim).swapaxes(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        offset = cache.offset  # an int, or (B,)
        if self.use_rope:
            queries, keys = (
                self.rope(rotated, offset=offset) for rotated in (queries, keys)
            )
        if self.use_qk_norm:
            queries, keys = (
                mx.fast.rms_norm(normed, weight=None, eps=self.norm_eps)
                for normed in (queries, keys)
            )
        if self.attn_temperature_tuning and not self.use_rope:
            # (B or 1, L)
            counts = mx.array(offset).reshape(-1, 1) + mx.arange(1, length + 1)
            scales = (
                mx.log(mx.floor(counts / self.floor_scale) + 1.0) * self.attn_scale
                + 1.0
            )
            queries = (queries * scales[:, None, :, None]).astype(queries.dtype)
        keys, values = cache.update_and_fetch(keys, values)
        output = attention(queries, keys, values, cache, self.scale, mask)
        return self.o_proj(output.swapaxes(1, 2).flatten(-2))


class RowModel(LlamaModel):
    """mlx-vlm masks all rows by the farthest one (llama4/language.py:246-264)."""

    def __call__(
        self,
        input_ids: mx.array | None = None,
        input_embeds: mx.array | None = None,
        mask: Any = None,
        cache: Sequence[Any] = (),
    ) -> mx.array:
        hidden = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        masks: dict[bool, Any] = {}  # by kind of layer
        for layer, single in zip(self.layers, cache, strict=True):
            blocked = bool(layer.use_chunked_attention)
            if blocked not in masks:
                masks[blocked] = create_attention_mask(hidden, single)
            hidden = layer(hidden, masks[blocked], cache=single)
        return self.norm(hidden)


class SeveralExperts(MoE):
    """Weighs each expert's input by its own score (modeling_llama4.py, Llama4TextMoe).

    mlx-vlm's is right for one expert only (llama4/language.py:152).
    """

    def __call__(self, x: mx.array) -> mx.array:
        if self.top_k == 1:
            return super().__call__(x)
        logits = self.router(x)
        # (B, L, K)
        chosen = mx.argpartition(-logits, kth=self.top_k - 1, axis=-1)[
            ..., : self.top_k
        ]
        scores = mx.sigmoid(
            mx.take_along_axis(logits, chosen, axis=-1).astype(mx.float32)
        ).astype(x.dtype)
        # an expert's input a row
        scaled = (x[..., None, :] * scores[..., None]).reshape(-1, 1, x.shape[-1])
        answers = self.experts(scaled, chosen.reshape(-1, 1, 1)).reshape(
            *chosen.shape, -1
        )
        return answers.sum(axis=-2) + self.shared_expert(x)


PATCHES: dict[type, type] = {
    Attention: RowAttention,
    LlamaModel: RowModel,
    MoE: SeveralExperts,
}
