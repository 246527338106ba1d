"""Step 3.7: sliding and full layers, experts, pictures in patches."""

from __future__ import annotations

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="step3p7", model_types=("step3p7",)))
class Step3p7(Adapter):
    tower_class = RememberingBatchTower
    input_keys = frozenset(
        {"pixel_values", "patch_pixel_values", "num_patches", "image_embeds"}
    )
