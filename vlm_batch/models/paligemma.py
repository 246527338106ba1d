"""PaliGemma 1 and 2: SigLIP before Gemma or Gemma 2, and a prompt whose tokens all see each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.prompts import put_features
from vlm_batch.caches.rows import RowStates, attend_rows
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
        from mlx_vlm.models.paligemma.language import Attention

        class RowAttention(Attention):
            """Upstream writes Gemma 2's capped attention out over one array of keys and float masks
            (paligemma/language.py:110-152); here it also runs a row at a time, with bools."""

            def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
                """(B, L, D) -> (B, L, D)"""
                if self.model_type == "gemma" or cache is None:
                    return super().__call__(x, mask, cache)
                heads = (self.n_heads, self.n_kv_heads, self.n_kv_heads)
                queries, keys, values = (
                    project(x).reshape(*x.shape[:2], number, -1).swapaxes(1, 2)
                    for project, number in zip((self.q_proj, self.k_proj, self.v_proj), heads, strict=True)
                )
                queries, keys = self.rope(queries, offset=cache.offset), self.rope(keys, offset=cache.offset)
                keys, values = cache.update_and_fetch(keys, values)
                if isinstance(keys, RowStates):
                    output = attend_rows(self.capped, queries, keys, values, self.scale, mask, None)
                else:
                    output = self.capped(queries, keys, values, cache, scale=self.scale, mask=mask)
                return self.o_proj(output.swapaxes(1, 2).flatten(-2))

            def capped(
                self, queries: mx.array, keys: mx.array, values: mx.array, cache: Any, *, scale: float, mask: Any
            ) -> mx.array:
                """(B, H, L, D) over (B, H_kv, T, D): scores are capped by tanh before the softmax, in float32."""
                groups = (queries.shape[0], self.n_kv_heads, self.repeats, *queries.shape[2:])
                scores = (queries.reshape(groups) * scale).astype(mx.float32) @ keys[:, :, None].astype(
                    mx.float32
                ).swapaxes(-1, -2)  # (B, H_kv, H / H_kv, L, T)
                if (cap := self.attn_logit_softcapping) is not None:
                    scores = mx.tanh(scores / cap) * cap
                if isinstance(mask, mx.array):
                    visible = mask[:, :, None] if mask.ndim == 4 else mask
                    scores = mx.where(visible, scores, mx.finfo(scores.dtype).min)
                weights = mx.softmax(scores, axis=-1, precise=True).astype(queries.dtype)
                return (weights @ values[:, :, None]).reshape(*queries.shape[:3], values.shape[-1])

        return {Attention: RowAttention}

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
