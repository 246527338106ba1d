"""Muse Glimmer: sliding layers with RoPE, full ones without."""

from __future__ import annotations

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingPackedTower
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="muse_glimmer", model_types=("muse_glimmer",)))
class MuseGlimmer(Adapter):
    tower_class = RememberingPackedTower
    input_keys = Adapter.input_keys | {"image_grid_thw"}
