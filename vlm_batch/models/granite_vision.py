"""Granite Vision: LLaVA-NeXT with several SigLIP layers."""

from __future__ import annotations

from vlm_batch.models.llava_next import LlavaNext
from vlm_batch.records import Graphs
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
    graphs = Graphs.IF_ASKED
