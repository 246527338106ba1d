"""InternVL in transformers' format: InternViT tiles, pixel shuffle, Qwen3."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower
from vlm_batch.records import Graphs
from vlm_batch.registry import ModelSpec, register


class ExactGELU(nn.GELU):
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
    graphs = Graphs.IF_ASKED
    tower_class = RememberingBatchTower
    input_keys = frozenset({"pixel_values"})
    ignored = frozenset({"image_token_index", "num_patches_list"})

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        return {nn.GELU: ExactGELU}
