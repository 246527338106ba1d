"""Replacement modules for Muse Spark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import create_attention_mask
from mlx_vlm.models.muse_spark.language import MuseSparkTextModel


class UnroundedTextModel(MuseSparkTextModel):
    """The trunk without mlx-vlm's casts to bfloat16."""

    def __call__(
        self,
        inputs: mx.array,
        *,
        cache: Sequence[Any],
        inputs_embeds: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> mx.array:
        """(B, L) or (B, L, D) -> (B, L, D), float32."""
        stream = (
            self.embed(inputs) if inputs_embeds is None else inputs_embeds
        ).astype(mx.float32)
        masks = {False: create_attention_mask(stream, cache[self.fa_idx])}
        if self.swa_idx is not None:
            masks[True] = create_attention_mask(
                stream, cache[self.swa_idx], window_size=self.sliding_window
            )
        norms = [layer.input_layernorm for layer in self.layers]
        normed = norms[0](stream).astype(norms[0].weight.dtype)
        for layer, single, following in zip(
            self.layers, cache, [*norms[1:], None], strict=True
        ):
            stream, normed = layer(
                stream,
                mask=masks[layer.use_sliding],
                cache=single,
                attn_input=normed,
                next_norm=following,
            )
        return self.norm(stream)


PATCHES: dict[type, type] = {MuseSparkTextModel: UnroundedTextModel}
