"""dots.ocr: Qwen2 with one-dimensional positions behind a vision tower of its own."""

from __future__ import annotations

from collections.abc import Mapping

from vlm_batch.adapters.grids import GridAdapter
from vlm_batch.adapters.modules import LastPosition
from vlm_batch.adapters.windows import attend_pictures
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="dots_ocr", model_types=("dots_ocr",)))
class DotsOCR(GridAdapter):
    """The plain ``Adapter`` serves it, but for the place of the head."""

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.dots_ocr.vision import VisionAttention

        return {VisionAttention: attend_pictures(VisionAttention)}

    def last_position_logits(self) -> None:
        """The head is the trunk's own here, so the last position is cut out before it."""
        self.language.model.norm = LastPosition(self.language.model.norm)
