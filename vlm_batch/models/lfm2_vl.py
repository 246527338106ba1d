"""LFM2-VL: short convolutions, and attention in some layers."""

from __future__ import annotations

from typing import Any

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower, patching
from vlm_batch.adapters.placing import Merge
from vlm_batch.adapters.recurrent import in_order
from vlm_batch.inputs.processors import without_special_tokens
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="lfm2_vl", model_types=("lfm2_vl", "lfm2-vl")))
class Lfm2VL(Adapter):
    merge = Merge("merge_input_ids_with_image_features", keeps_type=True)
    _masks_states = True
    tower_class = RememberingBatchTower
    input_keys = Adapter.input_keys | {"spatial_shapes", "pixel_attention_mask"}
    ignored = frozenset({"image_rows", "image_cols"})
    patches = patching(
        (
            "lfm2.language.ShortConv",
            lambda conv: in_order(conv, ("in_proj",), "out_proj"),
        )
    )

    @classmethod
    def processor(cls, processor: Any) -> Any:
        return without_special_tokens(super().processor(processor))
