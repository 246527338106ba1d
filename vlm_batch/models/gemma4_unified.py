"""Gemma 4 unified: Gemma 4 without a tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.prompts import bidirectional_mask
from vlm_batch.adapters.sound import rows_within
from vlm_batch.models.gemma4 import Gemma4
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="gemma4_unified",
        model_types=("gemma4_unified",),
        video=True,
        audio=True,
        audio_seconds=30.0,
        notes=(
            "a picture is one chunk and attends within itself both ways in all layers, past their windows too: mlx-vlm's "
            "definition, which is that of transformers' forward (modeling_gemma4_unified.py:1174)",
            "recordings and videos stand where the chat has them: mlx-vlm's processor, which is Gemma 4's, makes the chat anew "
            "without videos and with recordings behind all words (gemma4/processing_gemma4.py:877)",
        ),
    )
)
class Gemma4Unified(Gemma4):
    def picture_masks(
        self, spans: Sequence[tuple[int, int]], start: int, end: int
    ) -> dict[str, mx.array]:
        window = self.config.text_config.sliding_window
        full = bidirectional_mask(spans, start, end)
        sliding = bidirectional_mask(spans, start, end, window, cut_pictures=False)
        return (
            {}
            if full is None or sliding is None
            else {"full_attention": full, "sliding_attention": sliding}
        )

    def encode_sound(self, sound: Mapping[str, Any]) -> mx.array:
        return rows_within(
            self.model.embed_audio(sound["input_features"]),
            np.array(sound["input_features_mask"]),
        )

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Remove mlx-vlm's note on the model (gemma4_unified.py:133)."""
        try:
            return super().features(ids, extra)
        finally:
            self.model.no_chunked_prefill = self.language.no_chunked_prefill = (
                self.model._base_no_chunked_prefill
            )
