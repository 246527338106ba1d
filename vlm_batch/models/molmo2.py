"""Molmo 2: features added to placeholders; picture tokens attend both ways."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingTower, patching, two_tables, unshared
from vlm_batch.records import Encoded
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="molmo2",
        model_types=("molmo2",),
        notes=(
            "all tokens of all pictures see each other, as in transformers (modeling_molmo2.py, create_causal_mask with "
            "one block of picture tokens); mlx-vlm makes no such mask, and its pictures are causal",
            "the vision tower's GELU is the tanh form that its config names; mlx-vlm takes the sigmoid form "
            "(molmo2/vision.py:13)",
        ),
    )
)
class Molmo2(Adapter):
    """Markers and column ends are picture tokens, too."""

    _features_have_rows = True
    embeddings = "model.wte"
    tower_class = unshared(RememberingTower, "its tower pools patches by their numbers among all of a request's")
    input_keys = Adapter.input_keys | {"image_token_pooling", "image_grids", "image_num_crops"}
    patches = patching(("molmo2.language.Molmo2Embedding", two_tables))

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        if self.config.vision_config.vit_config.hidden_act == "gelu_pytorch_tanh":
            for block in self.model.vision_tower.image_vit.transformer:
                # mlx-vlm: a sigmoid (molmo2/vision.py:13); transformers: ACT2FN["gelu_pytorch_tanh"].
                block.feed_forward.act = nn.GELU(approx="precise")

    @cached_property
    def image_token_ids(self) -> frozenset[int]:
        return frozenset({self.config.image_patch_id})

    def atomic_spans(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        """Return one span over all pictures."""
        marked = np.flatnonzero(self._is_picture(ids))
        return ((int(marked[0]), int(marked[-1]) + 1),) if "pixel_values" in extra and len(marked) else ()

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        """Return the pictures' mask (1, 1, L, end), bool."""
        if not any(start <= first < end for first, _ in encoded.atomic):
            return {}
        picture = mx.array(self._is_picture(encoded.input_ids)[:end])
        rows, columns = mx.arange(start, end)[:, None], mx.arange(end)[None, :]
        return {"mask": ((columns <= rows) | (picture[start:][:, None] & picture[None, :]))[None, None]}

    def _is_picture(self, ids: mx.array) -> np.ndarray:
        config = self.config
        markers = [config.image_start_token_id, config.low_res_image_start_token_id, config.image_end_token_id]
        markers += [config.image_patch_id, config.image_col_id, config.image_low_res_id]
        return np.isin(np.array(ids)[0], [*markers, config.frame_start_token_id, config.frame_end_token_id])
