"""dots.ocr: Qwen2 with one-dimensional positions behind a vision tower of its own."""

from __future__ import annotations

from collections.abc import Mapping

from vlm_batch.adapters.grids import GridAdapter
from vlm_batch.adapters.windows import attend_pictures
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="dots_ocr", model_types=("dots_ocr",)))
class DotsOCR(GridAdapter):
    """The plain ``Adapter`` serves it, but for the place of the head."""

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.dots_ocr.vision import VisionAttention

        return {VisionAttention: attend_pictures(VisionAttention)}

    last_hidden = "model.norm"
