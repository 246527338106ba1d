"""Gemma 3: sliding and full layers; a picture's tokens attend both ways."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.modules import RememberingBatchTower, patches_in
from vlm_batch.adapters.placeholders import PlacingAdapter
from vlm_batch.adapters.prompts import bidirectional_mask, spans_of
from vlm_batch.records import Encoded
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="gemma3",
        model_types=("gemma3",),
        notes=(
            "a picture attends within itself both ways, in full and in sliding layers, as in transformers "
            "(modeling_gemma3.py, create_masks_for_vision_model); in mlx-vlm the mask does not reach the attention",
            "picture features enter at their own scale; mlx-vlm divides them by the root of a configured default of 2048 "
            "and multiplies by that of the text's width (gemma3/gemma3.py:113, config.py:50)",
        ),
    )
)
class Gemma3(PlacingAdapter):
    """Chunks without a picture use mlx-vlm's masks."""

    _features_have_rows = True
    tower_class = RememberingBatchTower
    ignored = frozenset({"num_crops"})
    patches = patches_in("vlm_batch.models._gemma3")

    @classmethod
    def processor(cls, processor: Any) -> Any:
        """Name the token that mlx-vlm's processor expands (gemma3/processing_gemma3.py:148)."""
        if getattr(processor, "boi_token", None) is None:
            return processor
        processor = copy.copy(processor)
        processor.image_token = processor.boi_token
        return processor

    def encode_pictures(
        self, extra: Mapping[str, Any], dtype: mx.Dtype
    ) -> list[mx.array]:
        pictures = extra["pixel_values"].transpose(0, 2, 3, 1).astype(dtype)
        states, *_ = self.model.vision_tower(pictures, output_hidden_states=True)
        return list(self.model.multi_modal_projector(states))

    def to_embeddings(self, features: mx.array, dtype: mx.Dtype) -> mx.array:
        return features / embedding_scale(features.shape[-1], dtype)

    def atomic_spans(
        self, ids: mx.array, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        return spans_of(ids, self.image_token_ids) if "pixel_values" in extra else ()

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        full = bidirectional_mask(encoded.atomic, start, end)
        if full is None:
            return {}
        window = self.config.text_config.sliding_window
        return {"mask": (full, bidirectional_mask(encoded.atomic, start, end, window))}


def embedding_scale(width: int, dtype: mx.Dtype) -> mx.array:
    """Return the trunk's factor of embeddings, in bfloat16 (gemma3/language.py:192)."""
    return mx.array(width**0.5, mx.bfloat16).astype(dtype)
