"""LLaVA 1.5: CLIP or SigLIP, a projector and a plain decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower
from vlm_batch.adapters.placing import Merge
from vlm_batch.adapters.towers import use_tanh_gelu
from vlm_batch.records import Graphs
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="llava",
        model_types=("llava",),
        notes=(
            "a SigLIP tower's GELU has the tanh form of its configuration (gelu_pytorch_tanh); mlx-vlm takes CLIP's, the "
            "sigmoid's (llava/vision.py:8)",
        ),
    )
)
class Llava(Adapter):
    graphs = Graphs.IF_ASKED
    merge: ClassVar[Merge | None] = Merge(
        "_merge_input_ids_with_image_features", keeps_type=True
    )
    tower_class = RememberingBatchTower

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        if self.config.vision_config.model_type == "siglip_vision_model":
            use_tanh_gelu(self.model.vision_tower)

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Select several layers; mlx-vlm fails (llava/llava.py:66)."""
        several = not isinstance(self.model.vision_feature_layer, int)
        if several and extra.keys() & {"pixel_values", "cached_image_features"} == {
            "pixel_values"
        }:
            seen = self.model.multi_modal_projector(self.states(extra["pixel_values"]))
            extra = {**extra, "cached_image_features": seen}
        return super().features(ids, extra)

    def states(self, pictures: mx.array) -> mx.array:
        """(N, 3, S, S) -> (N, tokens, D) of selected layers."""
        *_, states = self.model.vision_tower(
            pictures.transpose(0, 2, 3, 1), output_hidden_states=True
        )
        layers = self.model.vision_feature_layer
        chosen = [
            states[layer] for layer in ([layers] if isinstance(layers, int) else layers)
        ]
        if self.model.vision_feature_select_strategy == "default":
            chosen = [layer[:, 1:] for layer in chosen]
        return mx.concatenate(chosen, axis=-1)
