"""LocateAnything: MoonViT before Qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingPackedTower, patching
from vlm_batch.adapters.towers import resized_positions
from vlm_batch.adapters.windows import moon_attention
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="locateanything",
        model_types=("locateanything",),
        special_tokens=(
            (
                "<box>",
                "boxes are <box><x1><y1><x2><y2></box>, parsed from the answer's text (NVlabs/Eagle, "
                "locateanything_worker.py)",
            ),
        ),
        notes=(
            "answers are decoded a token at a time; mlx-vlm can decode boxes in blocks, too (pbd.py)",
            "positions are resized by PyTorch's rule, as for kimi_k25",
        ),
    )
)
class LocateAnything(Adapter):
    tower_class = RememberingPackedTower
    input_keys = Adapter.input_keys | {
        "image_grid_hws",
        "image_token_id",
        "_grid_shapes",
    }
    patches = patching(
        ("locateanything.vision.Learnable2DInterpPosEmb", resized_positions),
        ("locateanything.vision.Attention", moon_attention),
    )

    def count_placeholders(self, extra: Mapping[str, Any]) -> int | None:
        if "image_grid_hws" not in extra:
            return None
        high, wide = self.config.vision_config.merge_kernel_size
        return sum(
            (h // high) * (w // wide)
            for h, w in np.array(extra["image_grid_hws"]).tolist()
        )
