"""Gemma 3: sliding and full layers; the tokens of a picture attend to each other both ways."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.prompts import bidirectional_mask, put_features, spans_of
from vlm_batch.registry import ModelSpec, register
from vlm_batch.types import Encoded


@register(
    ModelSpec(
        family="gemma3",
        model_types=("gemma3",),
        notes=(
            "a picture attends within itself both ways, in full and in sliding layers, as in transformers "
            "(modeling_gemma3.py, create_masks_for_vision_model); mlx-vlm's mask ends in gemma3/language.py's **kwargs",
            "picture features enter at their own scale; mlx-vlm divides them by the root of a configured default of 2048 "
            "and multiplies by that of the text's width (gemma3/gemma3.py:113, config.py:50)",
        ),
    )
)
class Gemma3(Adapter):
    """A picture is one chunk's; without one in it, a chunk takes upstream's own masks."""

    ignored_inputs = frozenset({"num_crops"})

    @classmethod
    def processor(cls, processor: Any) -> Any:
        """The same, but naming the token that it expands for a picture: mlx-vlm's expands ``boi_token`` and names another
        (gemma3/processing_gemma3.py:148), of which a prompt that is rendered already has none."""
        if getattr(processor, "boi_token", None) is None:
            return processor
        processor = copy.copy(processor)
        processor.image_token = processor.boi_token
        return processor

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.gemma3.language import Gemma3Model

        class TwoMasks(Gemma3Model):
            """Upstream gives a mask that it is given to all layers (gemma3/language.py:221); here it is a pair, for full
            and for sliding layers, as transformers has it (modeling_gemma3.py, create_masks_for_vision_model)."""

            def __call__(
                self, inputs: mx.array, inputs_embeds: mx.array | None = None, mask: Any = None, cache: Any = None
            ) -> mx.array:
                """(B, L) ids or (B, L, D) embeddings -> (B, L, D)"""
                if mask is None or inputs_embeds is None:
                    return super().__call__(inputs, inputs_embeds, mask, cache)
                full, sliding = mask
                hidden = inputs_embeds * embedding_scale(self.config.hidden_size, inputs_embeds.dtype)
                for index, (layer, entry) in enumerate(zip(self.layers, cache, strict=True)):
                    is_full = (index + 1) % self.sliding_window_pattern == 0
                    hidden = layer(hidden, full if is_full else sliding, entry)
                return self.norm(hidden)

        return {Gemma3Model: TwoMasks}

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Embeddings with the pictures in their places, divided by what the trunk multiplies all of them with."""
        embeds = self.language.model.embed_tokens(ids)
        if "pixel_values" not in extra:
            return {"inputs_embeds": embeds}
        features = extra.get("cached_image_features")
        if features is None:
            pictures = extra["pixel_values"].transpose(0, 2, 3, 1).astype(embeds.dtype)
            states, *_ = self.model.vision_tower(pictures, output_hidden_states=True)
            features = self.model.multi_modal_projector(states)
        width = features.shape[-1]
        features = features.reshape(-1, width) / embedding_scale(width, embeds.dtype)
        return {"inputs_embeds": put_features(embeds, ids, self.image_token_ids(), features)}

    def atomic_spans(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        return spans_of(ids, self.image_token_ids()) if "pixel_values" in extra else ()

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        full = bidirectional_mask(encoded.atomic, start, end)
        if full is None:
            return {}
        window = self.config.text_config.sliding_window
        return {"mask": (full, bidirectional_mask(encoded.atomic, start, end, window))}


def embedding_scale(width: int, dtype: mx.Dtype) -> mx.array:
    """What the trunk multiplies embeddings with: the root of their width in bfloat16 (gemma3/language.py:192)."""
    return mx.array(width**0.5, mx.bfloat16).astype(dtype)
