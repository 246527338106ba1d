"""MiniCPM-V 4.7: pictures in slices on a canvas, Qwen3.5's text model with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.models.minicpmv4_6 import MiniCPMV46
from vlm_batch.records import PositionState
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="minicpmv4_7",
        model_types=("minicpmv4_7",),
        video=True,
        notes=("positions and the merger's GELU: as minicpmv4_6",),
    )
)
class MiniCPMV47(MiniCPMV46):
    """The slices of a picture share a canvas, which gives their tokens positions on three axes."""

    ignored = MiniCPMV46.ignored | {"image_bound"}
    input_keys = MiniCPMV46.input_keys - {"image_bound"}

    def features_after(self, ids: mx.array, extra: Mapping[str, Any], cached: int) -> dict[str, Any]:
        """The features of the whole prompt, with which the positions of its rest come."""
        return self.features(ids, extra)

    def positions(self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]) -> PositionState:
        prompt, delta = features["position_ids"], features["rope_deltas"]
        return PositionState(prompt=prompt.astype(mx.int32), delta=int(delta.item()))

    def count_placeholders(self, ids: Any, extra: Mapping[str, Any]) -> int | None:
        """The merge tells: each slice has a run of placeholders of its own, and other lengths are refused there."""
        return None

    def picture_places(self, ids: mx.array, extra: Mapping[str, Any]) -> np.ndarray:
        return Adapter.picture_places(self, ids, extra)
