"""GLM-OCR: positions on three axes."""

from __future__ import annotations

from vlm_batch.adapters.grids import GridAdapter, MRoPEAdapter
from vlm_batch.adapters.modules import patching
from vlm_batch.adapters.placing import Merge
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
    merge = Merge("merge_input_ids_with_image_features")
    input_keys = GridAdapter.input_keys
    patches = patching(("glm_ocr.vision.GlmOcrVisionPatchEmbed", embed_by_product))
