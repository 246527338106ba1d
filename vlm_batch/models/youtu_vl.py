"""Youtu-VL: a windowed tower, latent attention, experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.latent import latent_attention
from vlm_batch.adapters.modules import RememberingPackedTower, patching
from vlm_batch.adapters.placing import Merge
from vlm_batch.adapters.routing import dropped_groups
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="youtu_vl",
        model_types=("youtu_vl",),
        notes=(
            "a dropped group of experts is out of the choice, as for kimi_k25 (youtu_vl/language.py:186)",
        ),
        not_on_cuda=(
            (
                "youtu_vl",
                "its tiny model ended with an illegal memory access on an H100 (rows joining late, and equal pictures), and "
                "its answers in 4 bits differed between a row alone and the same row in company",
            ),
        ),
    )
)
class YoutuVL(Adapter):
    merge = Merge("merge_input_ids_with_image_features")
    tower_class = RememberingPackedTower
    input_keys = frozenset({"pixel_values", "spatial_shapes"})
    ignored = frozenset({"pixel_attention_mask"})
    patches = patching(
        ("youtu_vl.language.YoutuAttention", latent_attention),
        ("youtu_vl.language.MoEGate", dropped_groups),
    )

    def count_placeholders(self, extra: Mapping[str, Any]) -> int | None:
        if "spatial_shapes" not in extra:
            return None
        sizes = np.array(extra["spatial_shapes"]).tolist()
        merged = int(self.config.vision_config.spatial_merge_size) ** 2
        return sum(high * wide // merged for high, wide in sizes)
