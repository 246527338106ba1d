"""Molmo: picture features are added to the tokens that an index names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower, two_tables
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import Picture
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="molmo", model_types=("molmo",), multi_image=False))
class Molmo(Adapter):
    """``image_input_idx`` says which token each feature is added to; below 0 it is added to none."""

    tower_class = RememberingBatchTower
    input_keys = Adapter.input_keys | {"image_input_idx", "image_masks"}

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.molmo.language import Embedding

        return {Embedding: two_tables(Embedding)}

    embeddings = "model.wte"
    last_hidden = "model.ln_f"

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Upstream's features of one picture. Refuses several: the processor makes a row of ids for each."""
        if ids.shape[0] != 1:
            raise InvalidPrompt("molmo takes one picture a request: its processor places one in a prompt")
        return super().features(ids, extra)

    def picture_places(self, ids: mx.array, extra: Mapping[str, Any]) -> np.ndarray:
        places = np.array(extra.get("image_input_idx", -1)).reshape(-1)
        return np.isin(np.arange(ids.shape[1]), places)

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        """From the first token that a feature is added to, to the last."""
        places = np.array(extra.get("image_input_idx", -1)).reshape(-1)
        places = places[places >= 0]
        return (Picture(int(places.min()), int(places.max()) + 1, extra),) if len(places) else ()
