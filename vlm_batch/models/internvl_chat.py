"""InternVL in its original format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.placing import Merge
from vlm_batch.models.internvl import InternVL
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="internvl_chat",
        model_types=("internvl_chat",),
        notes=("the vision side's GELU is exact, as for internvl",),
    )
)
class InternVLChat(InternVL):
    merge = Merge("_merge_input_ids_with_image_features", keeps_type=True)
    input_keys = Adapter.input_keys | {"image_token_index"}
    ignored = frozenset({"num_patches_list"})

    def picture_positions(self, ids: mx.array, extra: Mapping[str, Any]) -> np.ndarray:
        return np.array(ids)[0] == int(
            extra.get("image_token_index", self.config.image_token_index)
        )
