"""Replacement modules for Gemma 3."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.gemma3.language import Gemma3Model

from vlm_batch.models.gemma3 import embedding_scale


class TwoMasks(Gemma3Model):
    """Takes a mask for full and one for sliding layers; mlx-vlm's takes one (gemma3/language.py:221)."""

    def __call__(
        self,
        inputs: mx.array,
        inputs_embeds: mx.array | None = None,
        mask: Any = None,
        cache: Any = None,
    ) -> mx.array:
        if mask is None or inputs_embeds is None:
            return super().__call__(inputs, inputs_embeds, mask, cache)
        full, sliding = mask
        hidden = inputs_embeds * embedding_scale(
            self.config.hidden_size, inputs_embeds.dtype
        )
        for index, (layer, entry) in enumerate(zip(self.layers, cache, strict=True)):
            is_full = (index + 1) % self.sliding_window_pattern == 0
            hidden = layer(hidden, full if is_full else sliding, entry)
        return self.norm(hidden)


PATCHES: dict[type, type] = {Gemma3Model: TwoMasks}
