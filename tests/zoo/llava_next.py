"""LLaVA-NeXT: a picture is a small whole and tiles of it, packed row by row with the padding cut off (anyres)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import llava_next as upstream

from ._build import Rule, asks, enliven, fan_in, pixels, spread, text_request
from ._oracle import generate_from_embeddings, put_pictures, to_mx
from ._pictures import prompt
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily, Trace

TILE, PATCH = 16, 4
SIDE = TILE // PATCH
IMAGE = PLAIN
#: The published grids of tiles (rows, columns).
GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
#: (high, wide) pixels -> the grid it is cut into: filled, padded above and below, padded at the sides.
Picture = tuple[tuple[int, int], tuple[int, int]]
PICTURES: tuple[Picture, ...] = (
    ((16, 32), (1, 2)),
    ((20, 32), (2, 2)),
    ((48, 12), (3, 1)),
)


def build() -> nn.Module:
    """Four layers of 64, three vision layers of 32 of which two count."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="llava_next",
            image_token_index=IMAGE,
            vocab_size=VOCABULARY,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                model_type="mistral",
                hidden_size=64,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
            ),
            vision_config=upstream.VisionConfig(
                model_type="clip_vision_model",
                num_hidden_layers=3,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=2,
                image_size=TILE,
                patch_size=PATCH,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule("class_embedding", spread(0.5)),
        Rule("image_newline", spread(1.0)),
    ]
    enliven(model, seed=22, rules=rules, quiet=head)
    return model


def kept(size: tuple[int, int], grid: tuple[int, int]) -> tuple[slice, slice]:
    """The rows and columns of a grid's patches that are not padding (transformers, modeling_llava_next.unpad_image)."""
    high, wide = size
    rows, columns = (SIDE * tiles for tiles in grid)
    if wide / high > columns / rows:
        padding = (rows - int(round(high * columns / wide, 7))) // 2
        return slice(padding, rows - padding), slice(0, columns)
    padding = (columns - int(round(wide * rows / high, 7))) // 2
    return slice(0, rows), slice(padding, columns - padding)


def num_tokens_of(size: tuple[int, int], grid: tuple[int, int]) -> int:
    """The whole, and each kept row with a newline after it."""
    rows, columns = (part.stop - part.start for part in kept(size, grid))
    return SIDE**2 + rows * (columns + 1)


def request(seed: int, sizes: list[int]) -> Inputs:
    """Pictures of the given sizes."""
    return tiled_request(seed, [PICTURES[size] for size in sizes], IMAGE)


def tiled_request(seed: int, pictures: Sequence[Picture], marker: int) -> Inputs:
    """The tiles of a smaller grid are followed by zeros, as the processor pads them."""
    most = max(rows * columns for _, (rows, columns) in pictures) + 1
    tiles = np.zeros((len(pictures), most, 3, TILE, TILE), dtype=np.float32)
    for index, (_, (rows, columns)) in enumerate(pictures):
        tiles[index, : rows * columns + 1] = pixels(
            seed + 31 * index, rows * columns + 1, 3, TILE, TILE
        )
    return {
        "input_ids": prompt(
            seed, [[marker] * num_tokens_of(*picture) for picture in pictures]
        ),
        "pixel_values": tiles,
        "image_sizes": np.array([size for size, _ in pictures]),
    }


# One picture of 2, 4 or 3 tiles. Two pictures of different grids.
image, two_images = asks(request, (0, 1, 2), (1, 0))


def pack(
    features: mx.array, size: tuple[int, int], grid: tuple[int, int], newline: mx.array
) -> mx.array:
    """(1 + tiles, SIDE * SIDE, D) of one picture -> (tokens, D)."""
    rows, columns = grid
    tiles = features[1 : 1 + rows * columns].reshape(rows, columns, SIDE, SIDE, -1)
    plane = tiles.transpose(0, 2, 1, 3, 4).reshape(rows * SIDE, columns * SIDE, -1)[
        kept(size, grid)
    ]
    lines = [mx.concatenate([line, newline[None]]) for line in plane]
    return mx.concatenate([features[0], *lines])


def packed_features(
    features: Callable[[mx.array], mx.array],
    inputs: Inputs,
    pictures: Sequence[Picture],
    newline: mx.array,
) -> mx.array:
    """(tokens, D) of all pictures of a request, whose grids ``pictures`` say."""
    grids = dict(pictures)
    sizes = [tuple(size) for size in inputs["image_sizes"].tolist()]
    return mx.concatenate(
        [
            pack(features(mx.array(tiles)), size, grids[size], newline)
            for tiles, size in zip(inputs["pixel_values"], sizes, strict=True)
        ]
    )


def _features(model: nn.Module, tiles: mx.array) -> mx.array:
    """(T, 3, TILE, TILE) -> (T, SIDE * SIDE, D)"""
    *_, states = model.vision_tower(
        tiles.transpose(0, 2, 3, 1), output_hidden_states=True
    )
    return model.multi_modal_projector(states[-2][:, 1:])


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step, over pictures packed here."""
    arrays: dict[str, Any] = to_mx(inputs)
    prompt = model.language_model.model.embed_tokens(arrays["input_ids"])
    if "pixel_values" in arrays:
        packed = packed_features(
            partial(_features, model), inputs, PICTURES, model.image_newline
        )
        prompt = put_pictures(prompt, arrays["input_ids"], IMAGE, packed)
    return generate_from_embeddings(model, prompt, num_tokens)


FAMILY = TinyFamily(
    name="llava_next",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="The whole sequence at each step, pictures packed here. mlx-vlm takes the first picture's tiles only, puts "
    "one tile into each placeholder and a tile of newlines after them. transformers agrees with what is here "
    "(tests/references).",
)
