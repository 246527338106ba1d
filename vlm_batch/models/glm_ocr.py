"""GLM-OCR: positions on three axes."""

from __future__ import annotations

from collections.abc import Mapping

from vlm_batch.adapters.grids import GridAdapter, MRoPEAdapter
from vlm_batch.adapters.towers import embed_by_product
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="glm_ocr",
        model_types=("glm_ocr",),
        notes=(
            "positions travel with the row: mlx-vlm keeps the last request's on the model (glm_ocr/glm_ocr.py:77) and "
            "reads them in the decode steps of other rows (glm_ocr/language.py:482)",
        ),
    )
)
class GLMOCR(MRoPEAdapter):
    input_keys = GridAdapter.input_keys

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.glm_ocr.vision import GlmOcrVisionPatchEmbed

        return {GlmOcrVisionPatchEmbed: embed_by_product(GlmOcrVisionPatchEmbed)}
