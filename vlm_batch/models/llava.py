"""LLaVA 1.5: a tower, a projector, and a plain decoder that counts its positions."""

from __future__ import annotations

import mlx.nn as nn

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower
from vlm_batch.adapters.towers import use_tanh_gelu
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="llava",
        model_types=("llava",),
        notes=(
            "a SigLIP tower's GELU has the tanh form of its configuration (gelu_pytorch_tanh); mlx-vlm takes CLIP's, the "
            "sigmoid's (llava/vision.py:8)",
        ),
    )
)
class Llava(Adapter):
    """The decoder is a plain one; the tower is CLIP's, or SigLIP's with its own activation."""

    tower_class = RememberingBatchTower

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        if self.config.vision_config.model_type == "siglip_vision_model":
            use_tanh_gelu(self.model.vision_tower)
