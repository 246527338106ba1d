"""Bunny: SigLIP before Qwen2 or Llama, one id per picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.adapters.modules import RememberingTower, unshared
from vlm_batch.adapters.placeholders import OnePlaceholder
from vlm_batch.adapters.towers import use_tanh_gelu
from vlm_batch.records import Graphs
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="llava_bunny",
        model_types=("llava_bunny", "llava-qwen2", "bunny-llama"),
        notes=(
            "every picture has its place; mlx-vlm puts in the first one only (llava_bunny.py:135)",
            "SigLIP's GELU has its tanh form, as for llava (llava_bunny/vision.py:8)",
        ),
    )
)
class LlavaBunny(OnePlaceholder):
    """Skips the tower's last norm."""

    graphs = Graphs.IF_ASKED

    last_hidden = "model.norm"
    tower_class = unshared(
        RememberingTower,
        "no tiny model has its tower: nothing shows that pictures of a batch are those alone",
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        use_tanh_gelu(self.model.vision_tower)

    def count_positions(self, extra: Mapping[str, Any]) -> list[int]:
        vision = self.config.vision_config
        return [(vision.image_size // vision.patch_size) ** 2] * len(
            extra["pixel_values"]
        )

    def encode_pictures(
        self, extra: Mapping[str, Any], dtype: mx.Dtype
    ) -> list[mx.array]:
        *_, states = self.model.vision_tower(
            extra["pixel_values"].transpose(0, 2, 3, 1), output_hidden_states=True
        )
        return list(
            self.model.mm_projector(states[-1].astype(extra["pixel_values"].dtype))
        )
