"""dots.ocr: Qwen2 behind its own vision tower."""

from __future__ import annotations

from vlm_batch.adapters.grids import GridAdapter
from vlm_batch.adapters.modules import patching
from vlm_batch.adapters.placing import Merge
from vlm_batch.adapters.windows import attend_pictures
from vlm_batch.records import Graphs
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="dots_ocr", model_types=("dots_ocr",)))
class DotsOCR(GridAdapter):
    graphs = Graphs.IF_ASKED
    merge = Merge("merge_input_ids_with_image_features")
    last_hidden = "model.norm"
    patches = patching(("dots_ocr.vision.VisionAttention", attend_pictures))
