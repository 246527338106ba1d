"""Cohere Compass: attention and MLP side by side, sliding and full layers, M-RoPE, deepstack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.attention import attention
from vlm_batch.adapters.base import Adapter
from vlm_batch.models.qwen2_vl import Qwen3VL
from vlm_batch.registry import ModelSpec, register
from vlm_batch.types import DecodeStep, Encoded


@register(
    ModelSpec(
        family="cohere_compass",
        model_types=("cohere_compass",),
        notes=(
            "positions and deepstack features travel with the row; mlx-vlm keeps deltas on the model and counts padding "
            "twice (cohere_compass/language.py:612-625, :717)",
            "projections run for all rows at once; mlx-vlm runs them row by row (cohere_compass/language.py:129)",
        ),
    )
)
class CohereCompass(Qwen3VL):
    """Positions have one axis where the config has no M-RoPE section."""

    input_keys = Adapter.input_keys | {"image_grid_thw"}
    ignored_features = frozenset({"attention_mask"})

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.cohere_compass.language import Attention, DecoderLayer

        class RowAttention(Attention):
            """Upstream projects and attends row by row over its batch's padding (cohere_compass/language.py:180-300)."""

            def __call__(
                self,
                hidden_states: mx.array,
                mask: Any = None,
                cache: Any = None,
                position_ids: mx.array | None = None,
                position_embeddings: tuple[mx.array, mx.array] | None = None,
            ) -> mx.array:
                """(B, L, D) -> (B, L, D)"""
                batch, length, _ = hidden_states.shape
                queries, keys, values = (
                    project(hidden_states).reshape(batch, length, -1, self.head_dim).swapaxes(1, 2)
                    for project in (self.q_proj, self.k_proj, self.v_proj)
                )
                if position_embeddings is not None:
                    queries, keys = self._apply_precomputed(queries, keys, position_embeddings)
                keys, values = cache.update_and_fetch(keys, values)
                output = attention(queries, keys, values, cache, self.scale, mask)
                return self.o_proj(output.swapaxes(1, 2).flatten(-2))

        class RowLayer(DecoderLayer):
            """Upstream runs the MLP row by row (cohere_compass/language.py:364)."""

            def __call__(self, x: mx.array, mask: Any, cache: Any, position_ids: Any, position_embeddings: Any) -> Any:
                """(B, L, D) -> (B, L, D)"""
                normed = self.input_layernorm(x)
                attended = x + self.self_attn(normed, mask, cache, position_ids, position_embeddings)
                if self.is_parallel:
                    return attended + self.mlp(normed)
                return attended + self.mlp(self.post_attention_layernorm(attended))

            @property
            def is_parallel(self) -> bool:
                return "post_attention_layernorm" not in self

        return {Attention: RowAttention, DecoderLayer: RowLayer}

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Deepstack features as a plain list; their mask comes beside them."""
        found = super().features(ids, extra)
        if "deepstack_visual_embeds" in found:
            found["deepstack_visual_embeds"] = found["deepstack_visual_embeds"].embeddings
        return found

    def chunk_positions(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        return {"position_ids": self._axes(super().chunk_positions(encoded, start, end)["position_ids"])}

    def decode_extras(self, step: DecodeStep) -> dict[str, Any]:
        return {"position_ids": self._axes(super().decode_extras(step)["position_ids"])}

    def _axes(self, positions: mx.array) -> mx.array:
        """(3, B, L), or (B, L) without M-RoPE."""
        return positions if self.language.model.rotary_emb.position_selector is not None else positions[0]

    def forward(
        self, ids: mx.array, embeds: mx.array | None, cache: Sequence[Any], extra: Mapping[str, Any]
    ) -> mx.array:
        """Trunk and head; upstream's ``LanguageModel.__call__`` reads offsets back and remembers deltas."""
        hidden = self.language.model(ids, inputs_embeds=embeds, cache=cache, **extra)  # (B, 1, D)
        tied = self.language.config.tie_word_embeddings
        logits = (self.language.model.embed_tokens.as_linear if tied else self.language.lm_head)(hidden)[:, -1]
        scale = self.language.config.logit_scale
        return logits if scale is None else logits * scale
