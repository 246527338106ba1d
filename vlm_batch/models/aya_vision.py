"""Aya Vision and Command A Vision: Cohere2 with mostly sliding layers, whose caches mlx-vlm makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower
from vlm_batch.adapters.pictures import with_part
from vlm_batch.adapters.placing import Merge
from vlm_batch.records import Graphs
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="aya_vision",
        model_types=("aya_vision", "cohere2_vision"),
        notes=(
            "Command A Vision projects the tower's normed output, as in transformers (modeling_cohere2_vision.py:163); "
            "mlx-vlm takes the last layer's without the norm, which is Aya Vision's way (aya_vision.py:107)",
        ),
    )
)
class AyaVision(Adapter):
    merge = Merge("_merge_input_ids_with_image_features", keeps_type=True)
    tower_class = RememberingBatchTower
    graphs = Graphs.IF_ASKED
    input_keys = Adapter.input_keys | {"spatial_shapes", "num_patches"}

    @classmethod
    def processor(cls, processor: Any) -> Any:
        """Replace Command A Vision's processor, which needs torchvision."""

        def with_pillow(part: Any) -> Any:
            if type(part).__name__ != "Cohere2VisionImageProcessor":
                return part
            from vlm_batch.models._aya_vision import TileProcessor

            return TileProcessor.from_dict(part.to_dict())

        return with_part(processor, "image_processor", with_pillow)

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Encode Command A Vision's pictures here: the model takes ``cached_image_features`` in place of pixels."""
        given = extra.keys() & {"pixel_values", "cached_image_features"}
        if self.config.model_type == "cohere2_vision" and given == {"pixel_values"}:
            pixels = extra["pixel_values"].transpose(0, 2, 3, 1)
            shapes = extra.get("spatial_shapes")
            normed, *_ = self.model.vision_tower(
                pixels, spatial_shapes=shapes, output_hidden_states=True
            )
            extra = {
                **extra,
                "cached_image_features": self.model.multi_modal_projector(normed),
            }
        return super().features(ids, extra)
