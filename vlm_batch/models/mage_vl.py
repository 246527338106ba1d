"""Mage-VL: Qwen3 behind a vision tower with positions on three axes."""

from __future__ import annotations

from vlm_batch.adapters.grids import GridAdapter
from vlm_batch.adapters.modules import RememberingGridTower, apart
from vlm_batch.adapters.towers import PICTURES_MASKED_APART
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="mage_vl",
        model_types=("mage_vl",),
        no_video="not verified: transformers has no such model to compare with",
    )
)
class MageVL(GridAdapter):
    """The kind's adapter serves it as it is. Videos, whose patches come with positions, are refused: they are not verified."""

    tower_class = apart(RememberingGridTower, PICTURES_MASKED_APART)
    input_keys = frozenset({"pixel_values", "image_grid_thw"})
