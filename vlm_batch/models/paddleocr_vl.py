"""PaddleOCR-VL: Ernie 4.5 with positions on three axes."""

from __future__ import annotations

from functools import partial

import mlx.nn as nn

from vlm_batch.adapters.grids import GridAdapter, MRoPEAdapter
from vlm_batch.adapters.modules import patching
from vlm_batch.adapters.placing import Merge
from vlm_batch.adapters.windows import attend_pictures
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="paddleocr_vl",
        model_types=("paddleocr_vl",),
        special_tokens=(
            (
                "<|LOC_0|>",
                "spotting answers <|LOC_0|> to <|LOC_1000|>; PaddleX 3.7.2 decodes with skip_special_tokens=False "
                "where it spots (pipelines/paddleocr_vl/pipeline.py)",
            ),
        ),
        notes=(
            "positions travel with the row: mlx-vlm keeps the last request's on the model "
            "(paddleocr_vl/paddleocr_vl.py:67) and counts text positions from the second chunk on (language.py:424)",
            "the projector's norm has an epsilon of 1e-5, as in the published model and transformers; mlx-vlm takes 1e-6 "
            "(paddleocr_vl/vision.py:149)",
        ),
    )
)
class PaddleOCRVL(MRoPEAdapter):
    """Pictures only: mlx-vlm takes no ``pixel_values_videos``."""

    merge = Merge("merge_input_ids_with_image_features")
    input_keys = GridAdapter.input_keys
    # mlx-vlm's masks a request's pictures apart in one attention over all of them (paddleocr_vl/vision.py:254).
    patches = patching(
        ("paddleocr_vl.vision.Attention", partial(attend_pictures, output="out_proj"))
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        # transformers: PaddleOCRProjector
        self.model.visual.projector.pre_norm.eps = 1e-5
