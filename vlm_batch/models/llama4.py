"""Llama 4: three layers of four see blocks of positions with RoPE, every fourth sees all without; experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn
from mlx_vlm.models.cache import ChunkedKVCache

from vlm_batch.adapters.base import Adapter
from vlm_batch.caches.blocks import BlockCache
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="llama4",
        model_types=("llama4",),
        notes=(
            "blocks and the attention temperature are counted from each row's own position; mlx-vlm takes the farthest "
            "row's for all (llama4/language.py:86 and :254)",
            "the vision tower's GELU is the exact one, as in transformers (modeling_llama4.py, Llama4VisionMLP); mlx-vlm "
            "takes a sigmoid (llama4/vision.py:155)",
        ),
    )
)
class Llama4(Adapter):
    """A row's caches of blocked layers hold the current block only."""

    def __init__(self, model: nn.Module) -> None:
        from mlx_vlm.models.llama4.vision import Llama4VisionMLP

        super().__init__(model)
        for _, module in self.model.vision_model.named_modules():
            if isinstance(module, Llama4VisionMLP):
                module.activation_fn = nn.GELU()  # upstream: "fast", a sigmoid (llama4/vision.py:155)
        for layer in self.language.layers:
            # Upstream: 1e-6 (llama4/language.py:81); transformers: the config's (modeling_llama4.py, Llama4TextL2Norm).
            layer.self_attn.norm_eps = self.config.text_config.rms_norm_eps

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from vlm_batch.models._llama4 import PATCHES

        return PATCHES

    def make_cache(self) -> list[Any]:
        made = super().make_cache()
        return [BlockCache(single.chunk_size) if isinstance(single, ChunkedKVCache) else single for single in made]
