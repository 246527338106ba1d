"""Granite Vision: LLaVA-NeXT's tiles through several layers of SigLIP, and Granite text."""

from __future__ import annotations

from vlm_batch.models.llava_next import LlavaNext
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="granite_vision",
        model_types=("granite_vision", "granite-vision"),
        notes=(
            "a picture's tiles are packed as for llava_next (granite_vision/granite_vision.py:110-150)",
            "SigLIP's GELU has its tanh form, as for llava (granite_vision/vision.py:8)",
        ),
    )
)
class GraniteVision(LlavaNext):
    """LLaVA-NeXT with several layers of SigLIP side by side, and Granite text."""
