"""Idefics 3: tiles of one size before a plain decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import Graphs
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="idefics3",
        model_types=("idefics3",),
        special_tokens=(
            (
                "<doctag>",
                "granite-docling and SmolDocling answer in DocTags, decoded with skip_special_tokens=False (model "
                "cards; docling 2.143, vlm_model_specs.py)",
            ),
            (
                "<formula>",
                "CodeFormulaV2 is decoded with skip_special_tokens=False (docling 2.143, code_formula_vlm_model.py)",
            ),
        ),
    )
)
class Idefics3(Adapter):
    graphs = Graphs.IF_ASKED
    embeddings = "embed_tokens"
    last_hidden = "norm"
    tower_class = RememberingBatchTower
    input_keys = Adapter.input_keys | {"pixel_attention_mask"}

    def check_placeholders(self, ids: Any, extra: Mapping[str, Any]) -> None:
        """Refuse padded tiles: mlx-vlm attends padding (idefics3/vision.py:161)."""
        super().check_placeholders(ids, extra)
        mask = extra.get("pixel_attention_mask")
        if mask is None or (mask != 0).all():
            return
        own = (np.array(mask) != 0).mean(axis=(-1, -2))  # of each tile
        if ((own > 0) & (own < 1)).any():
            raise InvalidPrompt(
                f"{self.spec.family} takes whole tiles, as its processor makes them; pixel_attention_mask hides parts of some"
            )
