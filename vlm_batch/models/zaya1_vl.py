"""ZAYA1-VL: attention over convolved keys and queries, whose state lies beside the keys; pictures' tokens have LoRA weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import mlx.core as mx

from vlm_batch.adapters.grids import GridAdapter
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="zaya1_vl",
        model_types=("zaya1_vl",),
        notes=(
            "a chunk takes its own part of the pictures' mask; mlx-vlm cuts the whole one by a single offset "
            "(zaya1_vl/language.py:680), which a batch does not have",
            "prompts may be chunked; mlx-vlm's loop passes ``inputs=`` to a model that has no such name",
        ),
    )
)
class Zaya1VL(GridAdapter):
    """Positions are counted; the vision tower is Qwen2.5-VL's, with its windows."""

    prefill_axes: ClassVar[Mapping[str, int | None]] = {"visual_pos_masks": 1}

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.zaya1_vl.vision import VisionModel

        class DistinctWindows(VisionModel):
            """Qwen2.5-VL's tower without windows of length zero: a padded grid has windows without patches, whose boundaries
            repeat, and mlx-vlm compares array scalars by identity (qwen2_5_vl/vision.py:332)."""

            def get_window_index(self, grid_thw: mx.array) -> tuple[mx.array, mx.array]:
                index, boundaries = super().get_window_index(grid_thw)
                return index, mx.array(sorted(set(boundaries.tolist())), dtype=mx.int32)

        return {VisionModel: DistinctWindows}
