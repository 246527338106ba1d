"""Llama 4: blocks with RoPE in most layers, experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.cache import ChunkedKVCache

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower, patches_in
from vlm_batch.adapters.pictures import with_part
from vlm_batch.adapters.prompts import put_features
from vlm_batch.caches.blocks import BlockCache
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="llama4",
        model_types=("llama4",),
        notes=(
            "blocks and the attention temperature are counted from each row's own position; mlx-vlm takes the farthest "
            "row's for all (llama4/language.py:86 and :254)",
            "a picture is cut into up to 16 undistorted tiles with the whole picture behind them, as published; mlx-vlm's "
            "processor leaves the whole picture out, and the prompt has more placeholders than there are features "
            "(llama4/processing_llama4.py:67)",
            "a prompt whose placeholders are not as many as its pictures' features is refused; mlx-vlm answers it with "
            "features left out or repeated (llama4/llama4.py:99)",
            "the vision tower's GELU is the exact one, as in transformers (modeling_llama4.py, Llama4VisionMLP); mlx-vlm "
            "takes a sigmoid (llama4/vision.py:155)",
        ),
    )
)
class Llama4(Adapter):
    """Blocked layers' caches hold the current block only."""

    tower_class = RememberingBatchTower
    patches = patches_in("vlm_batch.models._llama4")

    def __init__(self, model: nn.Module) -> None:
        from mlx_vlm.models.llama4.vision import Llama4VisionMLP

        super().__init__(model)
        for _, module in self.model.vision_model.named_modules():
            if isinstance(module, Llama4VisionMLP):
                # mlx-vlm: a sigmoid (llama4/vision.py:155)
                module.activation_fn = nn.GELU()
        for layer in self.language.layers:
            # mlx-vlm: 1e-6 (llama4/language.py:81); transformers: the configuration's (modeling_llama4.py, Llama4TextL2Norm).
            layer.self_attn.norm_eps = self.config.text_config.rms_norm_eps

    @classmethod
    def processor(cls, processor: Any) -> Any:
        from mlx_vlm.models.llama4.processing_llama4 import Llama4ImageProcessor

        from vlm_batch.models._llama4_pictures import TileProcessor

        def published(theirs: Any) -> Any:
            if not isinstance(theirs, Llama4ImageProcessor) or isinstance(
                theirs, TileProcessor
            ):
                return theirs
            return TileProcessor(
                theirs.size,
                theirs.max_patches,
                tuple(theirs.image_mean),
                tuple(theirs.image_std),
            )

        return with_part(processor, "image_processor", published)

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Check the number of placeholders, which mlx-vlm does not (llama4.py:83)."""
        embeds = self.language.model.embed_tokens(ids)
        if "pixel_values" not in extra:
            return {"inputs_embeds": embeds}
        seen = self.model.get_image_features(
            pixel_values=extra["pixel_values"],
            vision_feature_layer=-1,
            vision_feature_select_strategy="default",
        )
        features = self.model.multi_modal_projector(seen.flatten(0, -2))
        return {
            "inputs_embeds": put_features(embeds, ids, self.image_token_ids, features)
        }

    def row_caches(self) -> list[Any]:
        made = super().row_caches()
        return [
            BlockCache(single.chunk_size)
            if isinstance(single, ChunkedKVCache)
            else single
            for single in made
        ]
