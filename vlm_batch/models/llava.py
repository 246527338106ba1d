"""LLaVA 1.5, LLaVA-NeXT and LLaVA-OneVision: a tower, a projector, and a plain decoder that counts its positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.prompts import put_features, sized_pictures, tiles_of
from vlm_batch.errors import InvalidPrompt
from vlm_batch.inputs.videos import Sampling
from vlm_batch.registry import ModelSpec, register

#: The published grids of tiles (rows, columns), in the checkpoints' order; mlx-vlm does not keep the configured ones.
GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))


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
    """The decoder is a plain one; the tower is CLIP's, or SigLIP's with its own activation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        if self.config.vision_config.model_type == "siglip_vision_model":
            use_tanh_gelu(self.model.vision_tower)


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
class LlavaNext(Llava):
    """The picture side is done here; mlx-vlm's language model is right."""

    input_keys = frozenset({"pixel_values", "image_sizes"})

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Embeddings with each picture's packed features in its placeholders."""
        embeds = self.language.model.embed_tokens(ids)
        if "pixel_values" not in extra:
            return {"inputs_embeds": embeds}
        if "image_sizes" not in extra:
            raise InvalidPrompt("llava_next takes its pictures with their image_sizes (pictures, 2)")
        features = self._encode(sized_pictures(extra))
        return {"inputs_embeds": put_features(embeds, ids, self.image_token_ids(), features)}

    def _encode(self, pictures: Any) -> mx.array:
        """Of all pictures in order, each (tiles, 3, S, S) with its (high, wide) in pixels: (tokens, D)."""
        packed = []
        for tiles, size in pictures:
            grid = self.grid(size)
            features = self.model.multi_modal_projector(self.states(tiles_of(tiles, size, grid)))
            packed.append(pack(features, size, grid, self.model.image_newline))
        return mx.concatenate(packed)

    def grid(self, size: Sequence[int]) -> tuple[int, int]:
        """The grid of tiles of a picture of (high, wide) pixels: the checkpoint's, where its configuration keeps them."""
        tile = int(self.config.vision_config.image_size)
        configured = getattr(self.config, "image_grid_pinpoints", None) or ()
        return best_grid(size, tile, [(high // tile, wide // tile) for high, wide in configured] or GRIDS)

    def states(self, tiles: mx.array) -> mx.array:
        """(T, 3, S, S) -> (T, tokens, D) of the tower's chosen layer, or of several side by side."""
        *_, states = self.model.vision_tower(tiles.transpose(0, 2, 3, 1), output_hidden_states=True)
        layers = self.model.vision_feature_layer
        chosen = [states[layer] for layer in ([layers] if isinstance(layers, int) else layers)]
        if self.model.vision_feature_select_strategy == "default":
            chosen = [layer[:, 1:] for layer in chosen]
        return mx.concatenate(chosen, axis=-1)


@register(
    ModelSpec(
        family="granite_vision",
        model_types=("granite_vision", "granite-vision"),
        notes=(
            "a picture's tiles are packed as for llava_next (granite_vision/granite_vision.py:110-150)",
            "SigLIP's GELU has its tanh form, as for llava (granite_vision/vision.py:8)",
        ),
    )
)
class GraniteVision(LlavaNext):
    """LLaVA-NeXT with several layers of SigLIP side by side, and Granite text."""


@register(
    ModelSpec(
        family="llava_onevision",
        model_types=("llava_onevision",),
        video=True,
        notes=(
            "several videos in one prompt must give equally many frames: mlx-vlm's processor stacks them, and refuses others "
            "(processing_llava_onevision.py:79)",
        ),
    )
)
class LlavaOnevision(Adapter):
    """A video is its frames, each pooled to a quarter of its patches, and one newline."""

    input_keys = Adapter.input_keys | {"image_sizes", "pixel_values_videos"}
    #: The paper's (arXiv:2408.03326, section 3.2: at most 32 frames, 196 tokens each).
    video_sampling = Sampling(num_frames=32, frame_factor=1)
    ignored_inputs = frozenset({"batch_num_images"})


def use_tanh_gelu(tower: nn.Module) -> None:
    """Give the working copy's tower GELU in its tanh form in place of the sigmoid's."""
    for _, module in tower.named_modules():
        if isinstance(module.get("activation_fn"), nn.GELU):
            module.activation_fn = nn.GELU(approx="tanh")


def best_grid(size: Sequence[int], tile: int, grids: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Which grid (rows, columns) of tiles the processor cut a picture of (high, wide) pixels into."""
    from transformers.image_processing_utils import select_best_resolution

    best = select_best_resolution((size[0], size[1]), [(tile * rows, tile * columns) for rows, columns in grids])
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
