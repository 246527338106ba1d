"""MiniCPM-V 4.7: slices with three-axis positions."""

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
    ignored = MiniCPMV46.ignored | {"image_bound"}
    input_keys = MiniCPMV46.input_keys - {"image_bound"}

    def features_after(
        self, ids: mx.array, extra: Mapping[str, Any], cached: int
    ) -> dict[str, Any]:
        return self.features(ids, extra)

    def positions(
        self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]
    ) -> PositionState:
        prompt, delta = features["position_ids"], features["rope_deltas"]
        return PositionState(prompt=prompt.astype(mx.int32), delta=int(delta.item()))

    def count_placeholders(self, extra: Mapping[str, Any]) -> int | None:
        return None

    def picture_positions(self, ids: mx.array, extra: Mapping[str, Any]) -> np.ndarray:
        return Adapter.picture_positions(self, ids, extra)
