"""FastVLM: FastViTHD before Qwen2; a prompt holds one id for each picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.modules import RememberingTower, apart
from vlm_batch.adapters.placeholders import OnePlaceholder
from vlm_batch.registry import ModelSpec, register

#: Pixels of a picture's side for each of FastViTHD's features.
FASTVIT_STRIDE = 64


@register(
    ModelSpec(
        family="fastvlm",
        model_types=("fastvlm", "llava_qwen2"),
        notes=("text between two pictures is cut where they are; mlx-vlm cuts one id too late (fastvlm.py:120)",),
    )
)
class FastVLM(OnePlaceholder):
    """The tower is mlx-vlm's as it is: its sizes are fixed, and the tests feed its features."""

    tower_class = apart(
        RememberingTower, "no tiny model has its tower: nothing shows that pictures of a batch are those alone"
    )

    def count_positions(self, extra: Mapping[str, Any]) -> list[int]:
        """The stem halves a picture twice, and four patch embeddings once each, rounding up (fastvlm/vision.py)."""
        count, _, height, width = extra["pixel_values"].shape
        return [-(-height // FASTVIT_STRIDE) * -(-width // FASTVIT_STRIDE)] * count

    def encode_pictures(self, extra: Mapping[str, Any], dtype: mx.Dtype) -> list[mx.array]:
        tower = self.model.vision_tower
        dtype = tower.vision_model.patch_embed.blocks[0].reparam_conv.weight.dtype
        _, features, _ = tower(extra["pixel_values"].transpose(0, 2, 3, 1).astype(dtype))  # (N, H, W, C)
        return list(self.model.mm_projector(features.flatten(1, 2)))
