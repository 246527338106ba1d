"""LLaVA-NeXT: a whole picture and its tiles, packed into one plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.placeholders import PlacingAdapter
from vlm_batch.adapters.prompts import sized_pictures, tiles_of
from vlm_batch.adapters.vision import best_grid, pack_tiles
from vlm_batch.errors import InvalidPrompt
from vlm_batch.models.llava import Llava
from vlm_batch.registry import ModelSpec, register

#: Published grids (rows, columns) in the checkpoints' order; mlx-vlm drops the configured ones.
GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))


@register(
    ModelSpec(
        family="llava_next",
        model_types=("llava_next",),
        notes=(
            "a picture's tiles are packed row by row, without their padding, a newline after each row, as in "
            "transformers (modeling_llava_next.py, pack_image_features); mlx-vlm takes the first picture only, puts one "
            "tile into each placeholder and a tile of newlines after them (llava_next/llava_next.py:66-125)",
        ),
    )
)
class LlavaNext(PlacingAdapter, Llava):
    input_keys = frozenset({"pixel_values", "image_sizes"})

    def encode_pictures(
        self, extra: Mapping[str, Any], dtype: mx.Dtype
    ) -> list[mx.array]:
        if "image_sizes" not in extra:
            raise InvalidPrompt(
                f"{self.spec.family} takes its pictures with their image_sizes (pictures, 2)"
            )
        packed = []
        for tiles, size in sized_pictures(extra):
            grid = self.grid(size)
            features = self.model.multi_modal_projector(
                self.states(tiles_of(tiles, size, grid))
            )
            packed.append(pack_tiles(features, size, grid, self.model.image_newline))
        return packed

    def grid(self, size: Sequence[int]) -> tuple[int, int]:
        tile = int(self.config.vision_config.image_size)
        configured = getattr(self.config, "image_grid_pinpoints", None) or ()
        return best_grid(
            size,
            tile,
            [(high // tile, wide // tile) for high, wide in configured] or GRIDS,
        )
