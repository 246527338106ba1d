"""ZAYA1-VL: convolved keys and queries, LoRA weights for pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx

from vlm_batch.adapters.grids import GridAdapter
from vlm_batch.adapters.modules import patching, under
from vlm_batch.adapters.recurrent import in_order
from vlm_batch.registry import ModelSpec, register


class DistinctWindows:
    """Drops empty windows: mlx-vlm compares scalars by identity (qwen2_5_vl/vision.py:332)."""

    def get_window_index(self, grid_thw: mx.array) -> tuple[mx.array, mx.array]:
        theirs: Any = super()
        index, boundaries = theirs.get_window_index(grid_thw)
        return index, mx.array(sorted(set(boundaries.tolist())), dtype=mx.int32)


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
    prefill_axes: ClassVar[Mapping[str, int | None]] = {"visual_pos_masks": 1}
    patches = patching(
        ("zaya1_vl.language.CCA", in_order),
        ("zaya1_vl.vision.VisionModel", under(DistinctWindows)),
    )
