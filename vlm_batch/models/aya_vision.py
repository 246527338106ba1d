"""Aya Vision: Cohere2 with sliding windows on three layers of four, one-dimensional positions."""

from __future__ import annotations

from vlm_batch.models.base import Adapter
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="aya_vision", model_types=("aya_vision",)))
class AyaVision(Adapter):
    """Nothing is special: RoPE takes each row's own offset, and windows are the caches' business."""

    compiles = True
    input_keys = Adapter.input_keys | {"spatial_shapes", "num_patches"}
