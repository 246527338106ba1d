"""InternVL in its two formats: tiles through InternViT, a pixel shuffle, and a Qwen decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.registry import ModelSpec, register


class ExactGELU(nn.GELU):
    """GELU by the error function, whatever approximation it was made with."""

    def __call__(self, x: mx.array) -> mx.array:
        return nn.gelu(x)


@register(
    ModelSpec(
        family="internvl",
        model_types=("internvl",),
        notes=(
            "the vision side's GELU is the error function's, as the configurations say (hidden_act 'gelu') and "
            "transformers does; mlx-vlm takes its tanh form (internvl_chat/vision.py:70, internvl/internvl.py:21)",
        ),
    )
)
class InternVL(Adapter):
    """The format of transformers; Qwen3 text."""

    input_keys = frozenset({"pixel_values"})
    ignored_inputs = frozenset({"image_token_index", "num_patches_list"})

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        return {nn.GELU: ExactGELU}


@register(
    ModelSpec(
        family="internvl_chat",
        model_types=("internvl_chat",),
        notes=("the vision side's GELU is exact, as for internvl",),
    )
)
class InternVLChat(InternVL):
    """The original format: the processor says which id stands for pictures."""

    input_keys = Adapter.input_keys | {"image_token_index"}
    ignored_inputs = frozenset({"num_patches_list"})

    def count_image_tokens(self, ids: mx.array, extra: Mapping[str, Any]) -> int:
        marker = extra.get("image_token_index", self.config.image_token_index)
        return int((np.array(ids[0]) == int(marker)).sum())
