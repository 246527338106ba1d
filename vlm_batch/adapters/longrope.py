"""RoPE with short and long factors (LongRoPE, arXiv:2402.13753), chosen per row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.rope_utils import SuScaledRoPE

from vlm_batch.adapters.hooks import current
from vlm_batch.records import PromptKey
from vlm_batch.store.digest import as_words, digest

#: For ``ModelSpec.notes``.
LONG_ROPE_NOTE = (
    "long or short RoPE factors are a row's own choice: by the whole prompt's length, then by the token's position; "
    "mlx-vlm takes the farthest row's for all (rope_utils.py:176), and chooses again for each chunk of a prompt"
)


class RowLongRoPE(SuScaledRoPE):
    """LongRoPE with factors per row, by prompt length, then position.

    transformers also goes by the whole sequence (modeling_rope_utils.py, longrope_frequency_update); mlx-vlm takes the
    farthest row's, chunk by chunk (rope_utils.py:176).
    """

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        lengths = current().lengths  # of whole prompts, without padding
        end = mx.array(lengths) if lengths else mx.array(offset) + x.shape[-2]
        is_long = (end > self.original_max_position_embeddings).reshape(-1, 1, 1, 1)
        short = self._rotated(x, offset, self._short_freqs, self._short_scale)
        return mx.where(
            is_long, self._rotated(x, offset, self._long_freqs, self._long_scale), short
        )

    def _rotated(
        self, x: mx.array, offset: Any, freqs: mx.array, scale: mx.array
    ) -> mx.array:
        scaled = mx.concatenate(
            [scale.astype(x.dtype) * x[..., : self.dim], x[..., self.dim :]], axis=-1
        )
        return mx.fast.rope(
            scaled,
            self.dim,
            traditional=False,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=freqs,
        )


#: Patches of every family.
ROW_ROPES: Mapping[type, type] = {SuScaledRoPE: RowLongRoPE}


def longest_short(model: nn.Module) -> int | None:
    """Return the longest prompt with short factors, if any are long."""
    ropes = [
        module for _, module in model.named_modules() if isinstance(module, RowLongRoPE)
    ]
    return min((rope.original_max_position_embeddings for rope in ropes), default=None)


def marked_long(key: PromptKey) -> PromptKey:
    return key.mixed(as_words(digest("long factors")))
