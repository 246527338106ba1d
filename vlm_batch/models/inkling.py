"""Inkling: distances instead of positions, four short convolutions in every layer, pictures as patches without a tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower
from vlm_batch.errors import InvalidPrompt
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="inkling",
        model_types=("inkling", "inkling_mm_model"),
        notes=(
            "a row's biases and its scale for long contexts follow its own length; mlx-vlm's follow the batch's common one "
            "(inkling/language.py:476)",
            "sound and video are refused",
        ),
    )
)
class Inkling(Adapter):
    """Keys and values beside the convolutions' states; sliding layers keep all keys, as upstream does."""

    tower_class = RememberingBatchTower

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from vlm_batch.models._inkling import PATCHES

        return PATCHES

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Upstream's features. Refuses a wrong number of placeholders, for which upstream repeats or drops patches."""
        needed = len(extra["pixel_values"]) if "pixel_values" in extra else 0
        if (given := int(self.picture_places(ids, extra).sum())) != needed:
            raise InvalidPrompt(f"the pictures need {needed} placeholder tokens; the prompt has {given}")
        return super().features(ids, extra)
