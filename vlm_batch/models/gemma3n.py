"""Gemma 3n: shared keys, embeddings per token and layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.attention import attention
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingTower, unshared
from vlm_batch.records import Graphs, Picture
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="gemma3n",
        model_types=("gemma3n",),
        audio=True,
        audio_seconds=30.0,
        notes=(
            "a prompt's text embeddings are scaled by sqrt(hidden size), as decoded tokens are: mlx-vlm does not "
            "(gemma3n/gemma3n.py:122), transformers does (Gemma3nTextScaledWordEmbedding)",
            "layers that share keys and values turn their queries by the tokens' own positions; mlx-vlm reads the "
            "offset after it has advanced (gemma3n/language.py:136), so its answer depends on the chunks",
            "no position is zero, padding included, so the zero rows that mlx-vlm divides by (gemma3n/language.py:523) "
            "do not arise",
        ),
    )
)
class Gemma3n(Adapter):
    tower_class = unshared(
        RememberingTower,
        "no tiny model has its tower: nothing shows that pictures of a batch are those alone",
    )
    graphs = Graphs.NEVER  # its answers lie at the tolerance (docs/log.md)
    input_keys = Adapter.input_keys | {"input_features", "input_features_mask"}
    prefill_axes: ClassVar[Mapping[str, int | None]] = {"per_layer_inputs": 1}
    _features_have_rows = True

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.gemma3n.language import Gemma3nAttention

        class RowAttention(Gemma3nAttention):
            """Rotates sharing layers by tokens' positions, not the updated offset (gemma3n/language.py:136)."""

            def __call__(
                self, x: mx.array, mask: Any = None, cache: Any = None
            ) -> mx.array:
                if not self.is_kv_shared_layer:
                    return super().__call__(x, mask, cache)
                batch, length, _ = x.shape
                queries = self.q_norm(
                    self.q_proj(x).reshape(batch, length, -1, self.head_dim)
                ).swapaxes(1, 2)
                # -1 at empty places, which nobody reads
                queries = self.rope(queries, offset=cache.offset - length)
                keys, values = cache.state
                output = attention(queries, keys, values, cache, self.scale, mask)
                return self.o_proj(output.swapaxes(1, 2).flatten(-2))

        return {Gemma3nAttention: RowAttention}

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Scale words' embeddings; beside a picture, ids from the vision offset on are no words."""
        found = super().features(ids, extra)
        embeds = found["inputs_embeds"]
        scaled = embeds * self.config.text_config.hidden_size**0.5
        is_word = (ids < self.config.vision_config.vocab_offset)[..., None]
        return {
            **found,
            "inputs_embeds": mx.where(is_word, scaled, embeds) if extra else scaled,
        }

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        """Include the hard tokens that follow a picture."""
        is_hard = np.append(
            np.array(ids)[0] >= self.config.vision_config.vocab_offset, False
        )
        found = super().pictures(ids, extra)
        return tuple(
            replace(picture, end=picture.end + int(is_hard[picture.end :].argmin()))
            for picture in found
        )
