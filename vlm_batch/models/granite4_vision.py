"""Granite 4 Vision: picture projections, added before several decoder layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower
from vlm_batch.adapters.prompts import put_features, sized_pictures, tiles_of
from vlm_batch.adapters.towers import use_tanh_gelu
from vlm_batch.adapters.vision import best_grid, pack_tiles
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import Encoded
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="granite4_vision",
        model_types=("granite4_vision", "granite4-vision"),
        notes=(
            "all pictures of a request are encoded; mlx-vlm encodes the first only (granite4_vision.py:164)",
            "SigLIP's GELU has its tanh form, as for llava (granite4_vision/vision.py:77)",
            "which layers take the features is the model's own, not the last request's (granite4_vision.py:279)",
        ),
    )
)
class Granite4Vision(Adapter):
    tower_class = RememberingBatchTower
    input_keys = frozenset({"pixel_values", "image_sizes"})
    prefill_axes: ClassVar[Mapping[str, int | None]] = {
        "deepstack_visual_embeds": 1,
        "visual_pos_masks": 1,
    }

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        use_tanh_gelu(self.model.vision_tower)
        self.language.model._deepstack_target_layers = [
            layer for _, layer in self._projections()
        ]

    def _projections(self) -> list[tuple[tuple[int, Any], int]]:
        """((tower layer, projector), decoder layer) of each set."""
        config, model = self.config, self.model
        found = [
            ((int(seen), projector), int(layer))
            for projector, (seen, layer) in zip(
                model.layerwise_projectors,
                config.deepstack_layer_map or (),
                strict=True,
            )
        ]
        if config.use_spatial_sampling:
            pairs = zip(
                model.spatial_projectors,
                config.spatial_target_layers or (),
                strict=False,
            )
            found += [
                ((int(config.spatial_vision_layer), projector), int(layer))
                for projector, layer in pairs
            ]
        return found

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        """Return (features, L, D) and (1, L), which mlx-vlm cuts."""
        return dict(encoded.prefill)

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        embeds = self.language.model.embed_tokens(ids)
        if "pixel_values" not in extra:
            return {"inputs_embeds": embeds}
        if "image_sizes" not in extra:
            raise InvalidPrompt(
                "granite4_vision takes its pictures with their image_sizes (pictures, 2)"
            )
        packed = [self._encode(*picture) for picture in sized_pictures(extra)]
        empty, markers = mx.zeros_like(embeds), self.image_token_ids
        sets = [
            put_features(empty, ids, markers, mx.concatenate(list(one)))
            for one in zip(*packed, strict=True)
        ]
        is_picture = ids == self.config.image_token_index
        return {
            "inputs_embeds": mx.where(is_picture[..., None], 0, embeds),
            "deepstack_visual_embeds": mx.concatenate(sets),
            "visual_pos_masks": is_picture,
        }

    def _encode(self, tiles: mx.array, size: list[int]) -> list[mx.array]:
        """(tiles, 3, S, S) of (height, width) pixels -> features (tokens, D) per decoder layer."""
        tile = int(self.config.vision_config.image_size)
        grid = best_grid(
            size,
            tile,
            [
                (high // tile, wide // tile)
                for high, wide in self.config.image_grid_pinpoints
            ],
        )
        tiles = tiles_of(tiles, size, grid).transpose(0, 2, 3, 1)
        *_, states = self.model.vision_tower(tiles, output_hidden_states=True)
        skipped = int(self.config.vision_feature_select_strategy == "default")
        return [
            pack_tiles(
                projector(states[layer][:, skipped:]),
                size,
                grid,
                self.model.image_newline,
            )
            for (layer, projector), _ in self._projections()
        ]
