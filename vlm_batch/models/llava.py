"""LLaVA 1.5, LLaVA-NeXT and LLaVA-OneVision: a tower, a projector, and a plain decoder that counts its positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.errors import InvalidPrompt
from vlm_batch.models.base import Adapter, put_features
from vlm_batch.registry import ModelSpec, register

#: The published grids of tiles (rows, columns), in the checkpoints' order; mlx-vlm does not keep the configured ones.
GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))


@register(ModelSpec(family="llava", model_types=("llava",)))
class Llava(Adapter):
    """Nothing is special."""


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
class LlavaNext(Adapter):
    """The picture side is done here; mlx-vlm's language model is right."""

    input_keys = frozenset({"pixel_values", "image_sizes"})

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Embeddings with each picture's packed features in its placeholders."""
        embeds = self.language.model.embed_tokens(ids)
        if "pixel_values" not in extra:
            return {"inputs_embeds": embeds}
        if "image_sizes" not in extra:
            raise InvalidPrompt("llava_next takes its pictures with their image_sizes (pictures, 2)")
        sizes = np.array(extra["image_sizes"]).reshape(-1, 2).tolist()
        pictures = zip(extra["pixel_values"], sizes, strict=True)
        return {"inputs_embeds": put_features(embeds, ids, self.image_token_ids(), self._encode(pictures))}

    def _encode(self, pictures: Any) -> mx.array:
        """Of all pictures in order, each (tiles, 3, S, S) with its (high, wide) in pixels: (tokens, D)."""
        tile, model = self.config.vision_config.image_size, self.model
        packed = []
        for tiles, size in pictures:
            rows, columns = best_grid(size, tile, GRIDS)
            tiles = tiles[: rows * columns + 1].transpose(0, 2, 3, 1)
            *_, states = model.vision_tower(tiles, output_hidden_states=True)
            chosen = states[model.vision_feature_layer]
            if model.vision_feature_select_strategy == "default":
                chosen = chosen[:, 1:]
            packed.append(pack(model.multi_modal_projector(chosen), size, (rows, columns), model.image_newline))
        return mx.concatenate(packed)


@register(ModelSpec(family="llava_onevision", model_types=("llava_onevision",)))
class LlavaOnevision(Adapter):
    """Pictures only: videos are not verified, and refused."""

    input_keys = Adapter.input_keys | {"image_sizes"}
    ignored_inputs = frozenset({"batch_num_images"})


def best_grid(size: Sequence[int], tile: int, grids: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Which grid (rows, columns) of tiles the processor cut a picture of (high, wide) pixels into."""
    from transformers.image_processing_utils import select_best_resolution

    best = select_best_resolution(tuple(size), [(tile * rows, tile * columns) for rows, columns in grids])
    return best[0] // tile, best[1] // tile


def pack(features: mx.array, size: Sequence[int], grid: tuple[int, int], newline: mx.array) -> mx.array:
    """The whole picture and then its tiles as one plane, a newline after each row, without the rows or columns that pad.

    (1 + rows * columns, side * side, D) of a picture of (high, wide) pixels -> (tokens, D). The padding is counted as
    in transformers (modeling_llava_next.py, unpad_image).
    """
    (high, wide), side = size, int(features.shape[1] ** 0.5)
    plane = features[1:].reshape(*grid, side, side, -1).swapaxes(1, 2).reshape(grid[0] * side, grid[1] * side, -1)
    rows, columns, width = plane.shape
    if wide / high > columns / rows:
        padding = (rows - int(round(high * (columns / wide), 7))) // 2
        plane = plane[padding : rows - padding]
    else:
        padding = (columns - int(round(wide * (rows / high), 7))) // 2
        plane = plane[:, padding : columns - padding]
    ends = mx.broadcast_to(newline.astype(plane.dtype), (len(plane), 1, width))
    return mx.concatenate([features[0], mx.concatenate([plane, ends], axis=1).reshape(-1, width)])
