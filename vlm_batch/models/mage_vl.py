"""Mage-VL: a tower with three-axis positions before Qwen3."""

from __future__ import annotations

from vlm_batch.adapters.grids import GridAdapter
from vlm_batch.adapters.modules import RememberingGridTower, unshared
from vlm_batch.adapters.towers import PICTURES_MASKED_APART
from vlm_batch.records import Graphs
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="mage_vl",
        model_types=("mage_vl",),
        no_video="not verified: transformers has no such model to compare with",
    )
)
class MageVL(GridAdapter):
    graphs = Graphs.IF_ASKED
    tower_class = unshared(RememberingGridTower, PICTURES_MASKED_APART)
    input_keys = frozenset({"pixel_values", "image_grid_thw"})
