"""PaliGemma 1 and 2: SigLIP before Gemma or Gemma 2, and a prompt whose tokens all see each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.prompts import put_features
from vlm_batch.registry import ModelSpec, register
from vlm_batch.types import DecodeStep


@register(
    ModelSpec(
        family="paligemma",
        model_types=("paligemma",),
        chunked_prefill=False,
        notes=(
            "a prompt is one chunk: its tokens attend to each other both ways",
            "every picture's features go to its own placeholders; mlx-vlm encodes the first only (paligemma/vision.py:48) "
            "and puts them at the start of the prompt (paligemma/paligemma.py:119)",
            "picture features enter at their own scale, as in transformers (modeling_paligemma.py); mlx-vlm divides them "
            "by the root of the checkpoint's hidden_size, which in PaliGemma 2 is not the text's (paligemma.py:96)",
        ),
    )
)
class PaliGemma(Adapter):
    """A checkpoint may ask for a causal prompt (``use_bidirectional_attention: false``), which is chunked as usual."""

    ignored_inputs = frozenset({"labels"})

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from vlm_batch.models._paligemma import PATCHES

        return PATCHES

    @property
    def _is_prefix(self) -> bool:
        return bool(self.config.text_config.use_bidirectional_attention)

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Embeddings with the pictures in their places, divided by what the trunk multiplies all of them with."""
        embeds = self.language.model.embed_tokens(ids)
        if "pixel_values" not in extra:
            return {"inputs_embeds": embeds}
        features = extra.get("cached_image_features")
        if features is None:
            features = mx.concatenate([self._encode(picture.astype(embeds.dtype)) for picture in extra["pixel_values"]])
        width = features.shape[-1]
        features = features.reshape(-1, width) / mx.array(width**0.5, dtype=embeds.dtype)
        return {"inputs_embeds": put_features(embeds, ids, self.image_token_ids(), features)}

    def _encode(self, picture: mx.array) -> mx.array:
        """(3, S, S) -> (tokens, D)"""
        states, *_ = self.model.vision_tower(picture[None].transpose(0, 2, 3, 1), output_hidden_states=True)
        return self.model.multi_modal_projector(states)

    def atomic_spans(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        return ((0, ids.shape[1]),) if self._is_prefix else ()

    def decode_extras(self, step: DecodeStep) -> dict[str, Any]:
        """Without a mask, upstream takes a decoded token for a prompt's: no row would end (paligemma/language.py:238)."""
        return {"mask": step.caches[0].make_mask(1)} if self._is_prefix else {}  # type: ignore[attr-defined]
