"""DeepSeek-VL and Janus: SigLIP before Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.adapters.modules import RememberingBatchTower, patching, under
from vlm_batch.adapters.placeholders import PlacingAdapter
from vlm_batch.adapters.prompts import repeat_placeholders
from vlm_batch.records import Graphs
from vlm_batch.registry import ModelSpec, register


class ExactGELU:
    def __call__(self, x: mx.array) -> mx.array:
        return nn.gelu(x)


@register(
    ModelSpec(
        family="multi_modality",
        model_types=("multi_modality",),
        notes=(
            "each picture's features go to its own placeholders; mlx-vlm puts all pictures where the first one is and "
            "drops the text between them (multi_modality.py:265-285), and resizes only one picture for the small tower",
            "SigLIP's GELU is exact and its norms have an epsilon of 1e-6, as published (siglip_vit.py); mlx-vlm takes the "
            "tanh form (multi_modality/vision.py:166) and 1e-5 (multi_modality/config.py:53)",
        ),
    )
)
class MultiModality(PlacingAdapter):
    """A picture may come with one placeholder, or all."""

    graphs = Graphs.IF_ASKED

    tower_class = RememberingBatchTower
    input_keys = frozenset({"pixel_values"})
    patches = patching(("multi_modality.vision.FastGELUActivation", under(ExactGELU)))

    def __init__(self, model: nn.Module) -> None:
        from mlx_vlm.models.multi_modality.vision import SigLipVisionModel

        super().__init__(model)
        for _, tower in self.model.vision_model.named_modules():
            if isinstance(tower, SigLipVisionModel):
                for norm in (
                    tower.norm,
                    *(
                        norm
                        for block in tower.blocks
                        for norm in (block.norm1, block.norm2)
                    ),
                ):
                    norm.eps = 1e-6

    def expand_ids(self, ids: mx.array, extra: Mapping[str, Any]) -> mx.array:
        pictures = len(extra["pixel_values"]) if "pixel_values" in extra else 0
        if not pictures or self.picture_positions(ids, extra).sum() != pictures:
            return ids
        return repeat_placeholders(
            ids,
            self.config.image_token_index,
            [self.config.num_image_tokens] * pictures,
        )

    def encode_pictures(
        self, extra: Mapping[str, Any], dtype: mx.Dtype
    ) -> list[mx.array]:
        found = []
        for picture in extra["pixel_values"].transpose(0, 2, 3, 1):
            states = self.model.vision_model(picture[None], output_hidden_states=True)
            # its result is already (high, low)
            is_hybrid = self.config.vision_config.cls == "HybridVisionTower"
            found.append(self.model.aligner(states if is_hybrid else states[0])[0])
        return found
