"""MiniMax M3 VL: attention to indexed blocks of keys, experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingPackedTower, patches_in
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="minimax_m3_vl",
        model_types=("minimax_m3_vl",),
        no_video="not verified: its answers have not been compared with transformers",
        notes=(
            "blocks are picked for each row over its own keys; mlx-vlm counts padding and restarts positions when a "
            "request arrives (minimax_m3_vl.py:262, language.py:1494 and :2081)",
            "a step picks blocks for all rows at once; in slabs it attends for all at once, too",
            "each group of attention heads has blocks of its own, as published (MiniMax Sparse Attention, arXiv 2606.13392) "
            "and in transformers; mlx-vlm picks one set for all by the best score of any group (minimax_m3_vl/language.py:238)",
        ),
    )
)
class MiniMaxM3VL(Adapter):
    tower_class = RememberingPackedTower
    input_keys = Adapter.input_keys | {"image_grid_thw"}
    #: No layer reads it.
    ignored = frozenset({"visual_pos_masks"})
    patches = patches_in("vlm_batch.models._minimax_m3_vl")

    def forward(
        self,
        ids: mx.array,
        embeds: mx.array | None,
        cache: Sequence[Any],
        extra: Mapping[str, Any],
    ) -> mx.array:
        """Run trunk and head, without mlx-vlm's positions."""
        # (B, 1, D)
        hidden = self.language.model(ids, inputs_embeds=embeds, cache=cache, **extra)
        return self.language.logits_from_hidden(hidden)[:, -1]
