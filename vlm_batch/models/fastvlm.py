"""FastVLM: FastViTHD before Qwen2, one id per picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.modules import RememberingTower, unshared
from vlm_batch.adapters.placeholders import OnePlaceholder
from vlm_batch.records import Graphs
from vlm_batch.registry import ModelSpec, register

#: Pixels per side of one feature of FastViTHD.
FASTVIT_STRIDE = 64


@register(
    ModelSpec(
        family="fastvlm",
        model_types=("fastvlm", "llava_qwen2"),
        notes=(
            "text between two pictures is cut where they are; mlx-vlm cuts one id too late (fastvlm.py:120)",
        ),
    )
)
class FastVLM(OnePlaceholder):
    graphs = Graphs.IF_ASKED
    tower_class = unshared(
        RememberingTower,
        "no tiny model has its tower: nothing shows that pictures of a batch are those alone",
    )

    def count_positions(self, extra: Mapping[str, Any]) -> list[int]:
        """Count features: six halvings, rounded up (fastvlm/vision.py)."""
        count, _, height, width = extra["pixel_values"].shape
        return [-(-height // FASTVIT_STRIDE) * -(-width // FASTVIT_STRIDE)] * count

    def encode_pictures(
        self, extra: Mapping[str, Any], dtype: mx.Dtype
    ) -> list[mx.array]:
        tower = self.model.vision_tower
        dtype = tower.vision_model.patch_embed.blocks[0].reparam_conv.weight.dtype
        # (N, H, W, C)
        _, features, _ = tower(
            extra["pixel_values"].transpose(0, 2, 3, 1).astype(dtype)
        )
        return list(self.model.mm_projector(features.flatten(1, 2)))
