"""Cohere Compass: parallel attention and MLP, M-RoPE, deepstack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.base import Adapter, trunk_logits
from vlm_batch.adapters.modules import patches_in
from vlm_batch.models.qwen3_vl import Qwen3VL
from vlm_batch.registry import ModelSpec, register


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
    input_keys = Adapter.input_keys | {"image_grid_thw"}
    ignored = frozenset({"attention_mask"})
    patches = patches_in("vlm_batch.models._cohere_compass")

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        found = super().features(ids, extra)
        if "deepstack_visual_embeds" in found:
            found["deepstack_visual_embeds"] = found[
                "deepstack_visual_embeds"
            ].embeddings
        return found

    def forward(
        self,
        ids: mx.array,
        embeds: mx.array | None,
        cache: Sequence[Any],
        extra: Mapping[str, Any],
    ) -> mx.array:
        """Run trunk and head, without read-backs. Without M-RoPE, positions are (B, L)."""
        if self.language.model.rotary_emb.position_selector is None:
            extra = {**extra, "position_ids": extra["position_ids"][0]}
        logits = trunk_logits(self.language, ids, embeds, cache, extra)
        scale = self.language.config.logit_scale
        return logits if scale is None else logits * scale
