"""ZAYA1-VL: attention over convolved keys and queries, whose state lies beside the keys; pictures' tokens have LoRA weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from vlm_batch.adapters.grids import GridAdapter
from vlm_batch.adapters.windows import distinct_windows
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

        return {VisionModel: distinct_windows(VisionModel)}
