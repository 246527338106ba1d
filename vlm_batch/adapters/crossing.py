"""Adapters of encoder-decoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.base import create_attention_mask
from mlx_vlm.models.cache import KVCache

from vlm_batch.adapters.attention import attention
from vlm_batch.adapters.base import Adapter
from vlm_batch.caches.cross import CrossCache


class CrossingAdapter(Adapter):
    """Families whose decoder attends to tokens and an encoder's output.

    A row's caches are all layers' self-attention, then their cross-attention. Layers are named as in BART.
    """

    is_causal = False  # an encoder sees the whole prompt, or more

    embeddings = "model.shared"
    last_hidden = None  # the family returns the last position's logits

    def picture_positions(self, ids: mx.array, extra: Mapping[str, Any]) -> np.ndarray:
        return np.zeros(ids.shape[1], dtype=np.bool_)

    def row_caches(self) -> list[Any]:
        layers = self.language.model.decoder.layers
        return [KVCache() for _ in layers] + [CrossCache() for _ in layers]

    def hold(self, states: mx.array, cache: Sequence[Any]) -> None:
        """Store each layer's keys and values of the encoder's output (1, T, D)."""
        for layer, single in zip(
            self.language.model.decoder.layers, cache[len(cache) // 2 :], strict=True
        ):
            over = layer.encoder_attn
            single.hold(
                *(
                    split_heads(project(states), over.num_heads)
                    for project in (over.k_proj, over.v_proj)
                )
            )


def attend_own(module: Any, hidden: mx.array, cache: Any) -> mx.array:
    """Attend causally within tokens (B, L, D)."""
    mask = create_attention_mask(hidden, cache)
    fetched = cache.update_and_fetch(
        *(
            split_heads(project(hidden), module.num_heads)
            for project in (module.k_proj, module.v_proj)
        )
    )
    return _attend(module, hidden, fetched, cache, mask)


def attend_over(module: Any, hidden: mx.array, cache: Any) -> mx.array:
    """Attend from tokens (B, L, D) to the cached encoder output."""
    return _attend(module, hidden, cache.state, cache, None)


def split_heads(projected: mx.array, count: int) -> mx.array:
    """(B, L, H * D_head) -> (B, H, L, D_head)"""
    return projected.reshape(*projected.shape[:2], count, -1).swapaxes(1, 2)


def _attend(
    module: Any, hidden: mx.array, fetched: Any, cache: Any, mask: Any
) -> mx.array:
    queries = split_heads(module.q_proj(hidden), module.num_heads)
    keys, values = fetched
    output = attention(queries, keys, values, cache, module.scaling, mask)
    return module.out_proj(output.swapaxes(1, 2).flatten(-2))
