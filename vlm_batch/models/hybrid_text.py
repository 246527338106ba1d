"""Text models with recurrent layers that mlx-vlm carries: Qwen3-Next and Falcon-H1."""

from __future__ import annotations

from vlm_batch.models.base import Adapter
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="qwen3_next", model_types=("qwen3_next",), images=False, multi_image=False))
class Qwen3Next(Adapter):
    """Gated delta nets in most layers, attention and experts in the others. Pictures are refused."""

    input_keys = frozenset()


@register(ModelSpec(family="falcon_h1", model_types=("falcon_h1",), images=False, multi_image=False))
class FalconH1(Adapter):
    """Mamba-2 and attention side by side in every layer, each with a cache of its own. Pictures are refused."""

    input_keys = frozenset()
