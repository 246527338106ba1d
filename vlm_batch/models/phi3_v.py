"""Phi-3-Vision, Phi-3.5-Vision and Phi-4-multimodal: fused projections, and RoPE with short and long factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.attention import fused_attention
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.prompts import repeat_placeholders
from vlm_batch.errors import InvalidPrompt
from vlm_batch.registry import ModelSpec, register
from vlm_batch.store.digest import as_words, digest
from vlm_batch.types import Encoded, PromptKey

_LONG_ROPE = (
    "long or short RoPE factors are a row's own choice: by the whole prompt's length, then by the token's position "
    "(mlx-vlm takes the farthest row's for all, rope_utils.py:176, and chooses again for each chunk of a prompt)"
)


def _row_attention(parent: type) -> type:
    class RowAttention(parent):  # type: ignore[misc]
        """Upstream calls ``mx.fast`` past the hook (phi3_v.py:89, phi4mm/language.py:62)."""

        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            """(B, L, D) -> (B, L, D)"""
            return fused_attention(self, self.qkv_proj, self.o_proj, x, mask, cache)

    return RowAttention


def _long_rope() -> Mapping[type, type]:
    from mlx_vlm.models.rope_utils import SuScaledRoPE

    class RowLongRoPE(SuScaledRoPE):
        """Upstream takes the farthest row's factors for all, chunk by chunk (rope_utils.py:176); transformers goes by
        the whole sequence that is run (modeling_rope_utils.py, longrope_frequency_update)."""

        prompt = 0  # the length of the prompt that is being prefilled, if one is

        def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
            """(B, H, L, D) -> the same; offset is an int, or (B,)."""
            end = mx.maximum(mx.array(offset) + x.shape[-2], self.prompt)
            is_long = (end > self.original_max_position_embeddings).reshape(-1, 1, 1, 1)
            short = self._rotated(x, offset, self._short_freqs, self._short_scale)
            return mx.where(is_long, self._rotated(x, offset, self._long_freqs, self._long_scale), short)

        def _rotated(self, x: mx.array, offset: Any, freqs: mx.array, scale: mx.array) -> mx.array:
            scaled = mx.concatenate([scale.astype(x.dtype) * x[..., : self.dim], x[..., self.dim :]], axis=-1)
            return mx.fast.rope(scaled, self.dim, traditional=False, base=None, scale=1.0, offset=offset, freqs=freqs)

    return {SuScaledRoPE: RowLongRoPE}


class _Phi(Adapter):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._long_ropes = [rope for _, rope in self.language.named_modules() if hasattr(type(rope), "prompt")]

    def prompt_key(self, inputs: Mapping[str, Any]) -> PromptKey:
        """A prompt that is long enough for the long factors has other keys, and so has its answer."""
        key = super().prompt_key(inputs)
        if not any(key.length > rope.original_max_position_embeddings for rope in self._long_ropes):
            return key
        content = as_words(digest("long factors"))
        key.positions[:, 1:] ^= content
        return replace(key, answer=content)

    def prefill(self, encoded: Encoded, cache: list[Any], start: int, end: int) -> mx.array:
        """A prompt is turned by one choice of factors, whatever its chunks."""
        for rope in self._long_ropes:
            rope.prompt = encoded.length
        try:
            return super().prefill(encoded, cache, start, end)
        finally:
            for rope in self._long_ropes:
                rope.prompt = 0


@register(ModelSpec(family="phi3_v", model_types=("phi3_v",), notes=(_LONG_ROPE,)))
class Phi3V(_Phi):
    """The k-th picture's placeholders are the id -k; the model is its own language model."""

    input_keys = frozenset({"pixel_values", "image_sizes"})

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.phi3_v.phi3_v import Attention

        return {Attention: _row_attention(Attention), **_long_rope()}

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Upstream's own, for as many pictures as the prompt has placeholders for."""
        given, needed = len(set(np.array(ids[0]).clip(max=0).tolist()) - {0}), len(extra.get("image_sizes", ()))
        if given != needed:
            raise InvalidPrompt(f"the prompt has placeholders for {given} pictures, and {needed} are given")
        return super().features(ids, extra)

    def image_token_ids(self) -> frozenset[int]:
        """Negative ids, as the processor makes them of ``<|image_k|>``."""
        return frozenset(range(-256, 0))


@register(
    ModelSpec(
        family="phi4mm",
        model_types=("phi4mm",),
        notes=(
            _LONG_ROPE,
            "texts are answered with the vision adapter's weights, as mlx-vlm does: it merges them when it loads",
            "pictures are plain patches: mlx-vlm drops the published model's crops and separators (phi4mm.py, sanitize)",
            "audio is refused: mlx-vlm then exchanges the whole model's weights (phi4mm.py:set_modality)",
        ),
    )
)
class Phi4MM(_Phi):
    """One id stands for a whole picture; here it is repeated for each of its positions."""

    input_keys = Adapter.input_keys | {"pixel_attention_mask", "spatial_shapes"}

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.phi4mm.language import Attention

        return {Attention: _row_attention(Attention), **_long_rope()}

    def expand_ids(self, ids: mx.array, extra: Mapping[str, Any]) -> mx.array:
        (marker,) = self.image_token_ids()
        return repeat_placeholders(ids, marker, self._num_patches(extra))

    def count_image_tokens(self, ids: mx.array, extra: Mapping[str, Any]) -> int:
        """As many as patches in all pictures."""
        return sum(self._num_patches(extra))

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Upstream's own, which wants one id for a picture."""
        places = np.flatnonzero(np.isin(np.array(ids[0]), list(self.image_token_ids())))
        firsts = np.cumsum([0, *self._num_patches(extra)])[:-1]
        kept = np.delete(np.arange(ids.shape[1]), np.delete(places, firsts))
        return super().features(ids[:, mx.array(kept)], extra)

    def _num_patches(self, extra: Mapping[str, Any]) -> list[int]:
        return [high * wide for high, wide in np.array(extra.get("spatial_shapes", ())).astype(int).tolist()]
