"""ERNIE 4.5 VL: experts for pictures, positions on three axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx

from vlm_batch.adapters.grids import GridAdapter, MRoPEAdapter
from vlm_batch.adapters.modules import patching
from vlm_batch.adapters.windows import attend_pictures
from vlm_batch.records import PositionState
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="ernie4_5_moe_vl",
        model_types=("ernie4_5_moe_vl",),
        notes=(
            "a picture's tokens, its start and end included, go to the vision experts, as in transformers "
            "(processing_ernie4_5_vl_moe.py, create_moe_mm_token_type_ids) and the publisher's training code; mlx-vlm's "
            "generation sends them to the text experts (ernie4_5_moe_vl.py:253 is reached by __call__ alone)",
            "positions travel with the row; mlx-vlm makes them of each chunk without the pictures' grids "
            "(ernie4_5_moe_vl/language.py:603)",
            "a picture attends to itself only; from the third on, mlx-vlm lets them attend to each other "
            "(ernie4_5_moe_vl/vision.py:146)",
        ),
    )
)
class Ernie45MoeVL(MRoPEAdapter):
    """Pictures only: mlx-vlm's resampler takes one grid."""

    input_keys = GridAdapter.input_keys
    # mlx-vlm makes at most three segments (ernie4_5_moe_vl/vision.py:146), transformers one per picture
    # (Ernie4_5_VLMoeVisionAttention).
    patches = patching(("ernie4_5_moe_vl.vision.VisionAttention", attend_pictures))
    prefill_axes: ClassVar[Mapping[str, int | None]] = {"token_type_ids": 1}
    _features_have_rows = True

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Add the mask (1, L) of pictures' tokens."""
        config = self.config
        marks = {
            config.image_token_id,
            config.image_start_token_id,
            config.image_end_token_id,
        }
        is_vision = mx.stack([ids == mark for mark in marks]).any(axis=0)
        found = super().features(ids, extra)
        return (
            {**found, "token_type_ids": is_vision.astype(mx.int32)}
            if is_vision.any().item()
            else found
        )

    def positions(
        self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]
    ) -> PositionState:
        found, delta = self._rope_index(ids, extra.get("image_grid_thw"))  # (1, L, 3)
        return PositionState(
            prompt=mx.moveaxis(found.astype(mx.int32), -1, 0), delta=int(delta.item())
        )

    def forward(
        self,
        ids: mx.array,
        embeds: mx.array | None,
        cache: Sequence[Any],
        extra: Mapping[str, Any],
    ) -> mx.array:
        positions = mx.moveaxis(extra["position_ids"], 0, -1)  # (B, L, 3)
        return super().forward(ids, embeds, cache, {**extra, "position_ids": positions})
