from __future__ import annotations

from vlm_batch.models.qwen3_5 import Qwen35
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="qwen3_5_moe", model_types=("qwen3_5_moe",), video=True))
class Qwen35Moe(Qwen35):
    """Qwen3.5 with experts."""
