"""Qwen2.5-VL: M-RoPE with videos' time in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.grids import MRoPEAdapter
from vlm_batch.adapters.modules import patches_in
from vlm_batch.adapters.towers import GATED, widen
from vlm_batch.models.qwen2_vl import Qwen2VL
from vlm_batch.records import PositionState
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="qwen2_5_vl",
        model_types=("qwen2_5_vl",),
        video=True,
        notes=(
            "vision windows of length zero are dropped: mlx-vlm compares array scalars by identity and keeps them",
            "a video's positions go by its seconds, as in the published model; mlx-vlm drops second_per_grid_ts and "
            "counts frames (processing_qwen2_5_vl.py:87, language.py, get_rope_index)",
            *Qwen2VL.spec.notes,
        ),
    )
)
class Qwen25VL(Qwen2VL):
    input_keys = MRoPEAdapter.input_keys | {"second_per_grid_ts"}
    patches = patches_in("vlm_batch.models._qwen2_5_vl")

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        widen(self.model, GATED)  # 3,420 in the published 3B and 7B

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        return super().features(
            ids, {name: extra[name] for name in extra.keys() - {"second_per_grid_ts"}}
        )

    def positions(
        self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]
    ) -> PositionState:
        """Space a video's time steps by ``tokens_per_second`` times seconds (arXiv:2502.13923, section 2.1.2).

        float32, as in transformers 4.49, get_rope_index.
        """
        if "video_grid_thw" not in extra:
            return super().positions(ids, extra, features)
        rate = np.float32(self.config.vision_config.tokens_per_second)
        seconds = np.array(
            extra.get("second_per_grid_ts", np.ones(len(extra["video_grid_thw"]))),
            dtype=np.float32,
        )
        return self.grid_positions(ids, extra, (seconds * rate).tolist())
