"""DeepSeek-OCR-2: DeepSeek-OCR's pictures behind SAM, without CLIP."""

from __future__ import annotations

from vlm_batch.models.deepseekocr import SamOCR
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="deepseekocr_2",
        model_types=("deepseekocr_2",),
        multi_image=False,
        notes=SamOCR.notes,
    )
)
class DeepseekOCR2(SamOCR):
    """One picture a request: mlx-vlm fills the first picture's crops only (deepseekocr_2.py:95)."""
