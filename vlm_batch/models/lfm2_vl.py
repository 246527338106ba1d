"""LFM2-VL: short convolutions in most layers, attention in the others."""

from __future__ import annotations

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="lfm2_vl", model_types=("lfm2_vl", "lfm2-vl")))
class Lfm2VL(Adapter):
    """The plain ``Adapter`` serves it: the caches keep convolutions' states, and RoPE takes each row's own offset."""

    tower_class = RememberingBatchTower
    input_keys = Adapter.input_keys | {"spatial_shapes", "pixel_attention_mask"}
    ignored = frozenset({"image_rows", "image_cols"})
