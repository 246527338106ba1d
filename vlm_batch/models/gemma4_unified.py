"""Gemma 4 unified: Gemma 4 without a vision tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.prompts import bidirectional_mask
from vlm_batch.models.gemma4 import Gemma4
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="gemma4_unified",
        model_types=("gemma4_unified",),
        video=True,
        notes=(
            "a picture is one chunk and attends within itself both ways in all layers, past their windows too: mlx-vlm's "
            "definition, which is that of transformers' forward (modeling_gemma4_unified.py:1174)",
        ),
    )
)
class Gemma4Unified(Gemma4):
    """Gemma 4 without a tower: patches go through two norms and a matrix."""

    def picture_masks(self, spans: Sequence[tuple[int, int]], start: int, end: int) -> dict[str, mx.array]:
        window = self.config.text_config.sliding_window
        full = bidirectional_mask(spans, start, end)
        sliding = bidirectional_mask(spans, start, end, window, cut_pictures=False)
        return {} if full is None or sliding is None else {"full_attention": full, "sliding_attention": sliding}

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Upstream's own, without its note on the model, whether this prompt could be chunked (gemma4_unified.py:133)."""
        try:
            return super().features(ids, extra)
        finally:
            self.model.no_chunked_prefill = self.language.no_chunked_prefill = self.model._base_no_chunked_prefill
