"""Molmo: picture features are added to tokens by index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.media import has_pictures
from vlm_batch.adapters.modules import RememberingBatchTower, patching, two_tables
from vlm_batch.adapters.prompts import check_positions
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import Picture
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="molmo", model_types=("molmo",), multi_image=False))
class Molmo(Adapter):
    """``image_input_idx`` has each feature's token, or a negative number."""

    embeddings = "model.wte"
    last_hidden = "model.ln_f"
    tower_class = RememberingBatchTower
    input_keys = Adapter.input_keys | {"image_input_idx", "image_masks"}
    patches = patching(("molmo.language.Embedding", two_tables))

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        if ids.shape[0] != 1:
            raise InvalidPrompt(
                "molmo takes one picture a request: its processor places one in a prompt"
            )
        return super().features(ids, extra)

    def picture_positions(self, ids: mx.array, extra: Mapping[str, Any]) -> np.ndarray:
        positions = np.array(extra.get("image_input_idx", -1)).reshape(-1)
        return np.isin(np.arange(ids.shape[1]), positions)

    def check_placeholders(self, ids: Any, extra: Mapping[str, Any]) -> None:
        positions = np.array(extra.get("image_input_idx", -1)).reshape(-1)
        if has_pictures(extra) != (positions >= 0).any():
            raise InvalidPrompt(
                "pixel_values and image_input_idx belong together: one of them holds no picture"
            )
        check_positions(ids, [positions[positions >= 0]])

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        positions = np.array(extra.get("image_input_idx", -1)).reshape(-1)
        positions = positions[positions >= 0]
        return (
            (Picture(int(positions.min()), int(positions.max()) + 1, extra),)
            if len(positions)
            else ()
        )
