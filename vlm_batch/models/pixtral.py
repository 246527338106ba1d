"""Pixtral: pictures of any size before Mistral's decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.base import Adapter, GraphedSteps
from vlm_batch.adapters.modules import RememberingTower, unshared
from vlm_batch.adapters.towers import PICTURES_MASKED_APART
from vlm_batch.errors import InvalidPrompt
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="pixtral", model_types=("pixtral",)))
class Pixtral(GraphedSteps):
    tower_class = unshared(RememberingTower, PICTURES_MASKED_APART)
    input_keys = Adapter.input_keys | {"image_sizes"}

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Check placeholders: mlx-vlm drops pictures without any."""
        unit = self.config.vision_config.patch_size * getattr(self.config, "spatial_merge_size", 1)
        sizes = extra["image_sizes"].tolist() if "pixel_values" in extra else []
        needed = sum((high // unit) * (wide // unit) for high, wide in sizes)
        if (given := int(self.picture_places(ids, extra).sum())) != needed:
            raise InvalidPrompt(f"{len(sizes)} pictures need {needed} placeholder tokens; the prompt has {given}")
        return super().features(ids, extra)

    def model_image_sizes(self, extra: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        return tuple((int(wide), int(high)) for high, wide in extra["image_sizes"].tolist()) if extra else ()
