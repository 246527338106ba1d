"""RoPE with short and long factors (LongRoPE, arXiv:2402.13753), chosen for each row by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.rope_utils import SuScaledRoPE

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.hooks import current
from vlm_batch.records import PromptKey
from vlm_batch.store.digest import as_words, digest

#: For ``ModelSpec.notes``.
LONG_ROPE_NOTE = (
    "long or short RoPE factors are a row's own choice: by the whole prompt's length, then by the token's position "
    "(mlx-vlm takes the farthest row's for all, rope_utils.py:176, and chooses again for each chunk of a prompt)"
)


class RowLongRoPE(SuScaledRoPE):
    """Upstream takes the farthest row's factors for all, chunk by chunk (rope_utils.py:176); transformers goes by
    the whole sequence that is run (modeling_rope_utils.py, longrope_frequency_update)."""

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """(B, H, L, D) -> the same; offset is an int, or (B,)."""
        lengths = current().lengths  # while prompts are prefilled, whatever their chunks and what fills these up
        end = mx.array(lengths) if lengths else mx.array(offset) + x.shape[-2]
        is_long = (end > self.original_max_position_embeddings).reshape(-1, 1, 1, 1)
        short = self._rotated(x, offset, self._short_freqs, self._short_scale)
        return mx.where(is_long, self._rotated(x, offset, self._long_freqs, self._long_scale), short)

    def _rotated(self, x: mx.array, offset: Any, freqs: mx.array, scale: mx.array) -> mx.array:
        scaled = mx.concatenate([scale.astype(x.dtype) * x[..., : self.dim], x[..., self.dim :]], axis=-1)
        return mx.fast.rope(scaled, self.dim, traditional=False, base=None, scale=1.0, offset=offset, freqs=freqs)


class LongRoPEAdapter(Adapter):
    """Families whose prompts are turned by short or long factors, by their whole length."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._long_ropes = [rope for _, rope in self.language.named_modules() if isinstance(rope, RowLongRoPE)]

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        return {SuScaledRoPE: RowLongRoPE}

    def prompt_key(self, inputs: Mapping[str, Any]) -> PromptKey:
        """A prompt that is long enough for the long factors has other keys, and so has its answer."""
        key = super().prompt_key(inputs)
        if not any(key.length > rope.original_max_position_embeddings for rope in self._long_ropes):
            return key
        content = as_words(digest("long factors"))
        key.positions[:, 1:] ^= content
        return replace(key, answer=content)
