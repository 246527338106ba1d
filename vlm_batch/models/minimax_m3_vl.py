"""MiniMax M3 VL: layers that attend to a few blocks of keys which an index picks for each token; experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingPackedTower
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="minimax_m3_vl",
        model_types=("minimax_m3_vl",),
        no_video="not verified: its answers have not been compared with transformers",
        notes=(
            "blocks are picked for each row over its own keys; mlx-vlm counts padding and restarts positions when a "
            "request arrives (minimax_m3_vl.py:262, language.py:1494 and :2081). A row of such a layer keeps its own "
            "cache, whose attention is one call a row",
            "each group of attention heads has blocks of its own, as published (MiniMax Sparse Attention, arXiv 2606.13392) "
            "and in transformers; mlx-vlm picks one set for all by the best score of any group (minimax_m3_vl/language.py:238)",
        ),
    )
)
class MiniMaxM3VL(Adapter):
    """Positions are counts, pictures included. Videos are refused: they are not verified."""

    tower_class = RememberingPackedTower
    input_keys = Adapter.input_keys | {"image_grid_thw"}
    #: The pictures' places, which no layer reads.
    ignored = frozenset({"visual_pos_masks"})

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from vlm_batch.models._minimax_m3_vl import PATCHES

        return PATCHES

    def forward(
        self, ids: mx.array, embeds: mx.array | None, cache: Sequence[Any], extra: Mapping[str, Any]
    ) -> mx.array:
        """Trunk and head; upstream's ``LanguageModel.__call__`` remembers positions and deltas."""
        hidden = self.language.model(ids, inputs_embeds=embeds, cache=cache, **extra)  # (B, 1, D)
        return self.language.logits_from_hidden(hidden)[:, -1]
