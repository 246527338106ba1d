"""Kimi-VL: MoonViT before DeepSeek-V3's decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingPackedTower, patching
from vlm_batch.adapters.routing import dropped_groups
from vlm_batch.adapters.towers import resized_positions, use_tanh_gelu
from vlm_batch.adapters.windows import moon_attention
from vlm_batch.registry import ModelSpec, register


class Kimi(Adapter):
    """Families behind MoonViT."""

    input_keys = Adapter.input_keys | {"image_grid_hws", "image_token_id"}

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        use_tanh_gelu(self.model.vision_tower)

    def model_image_sizes(
        self, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        patch = int(self.config.vision_config.patch_size)
        return tuple(
            (int(w) * patch, int(h) * patch)
            for h, w in extra.get("image_grid_hws", mx.zeros((0, 2))).tolist()
        )


@register(
    ModelSpec(
        family="kimi_vl",
        model_types=("kimi_vl",),
        notes=(
            "MoonViT's GELU has its tanh form, as published and as for kimi_k25 (kimi_vl/vision.py:228)",
            "positions are resized by PyTorch's rule, as for kimi_k25",
            "a dropped group of experts is out of the choice, as in DeepSeek-V3 and transformers; mlx-vlm gives it a score of "
            "zero, which beats a kept expert of less (kimi_vl/language.py:252); published checkpoints have one group",
        ),
    )
)
class KimiVL(Kimi):
    tower_class = RememberingPackedTower
    input_keys = Kimi.input_keys | {"_grid_shapes"}
    patches = patching(
        ("kimi_vl.language.MoEGate", dropped_groups),
        ("kimi_vl.vision.Learnable2DInterpPosEmb", resized_positions),
        ("kimi_vl.vision.Attention", moon_attention),
    )

    def count_placeholders(self, extra: Mapping[str, Any]) -> int | None:
        if "image_grid_hws" not in extra:
            return None
        high, wide = self.config.vision_config.merge_kernel_size
        return sum(
            (h // high) * (w // wide)
            for h, w in np.array(extra["image_grid_hws"]).tolist()
        )
