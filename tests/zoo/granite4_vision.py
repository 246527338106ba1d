"""Granite 4 Vision: windows of queries over SigLIP's layers, packed like LLaVA-NeXT's tiles and added layer by layer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import granite4_vision as upstream

from ._build import Rule, asks, enliven, fan_in, pixels, spread, text_request
from ._oracle import generate_by_recomputing, to_mx, with_tanh_gelu
from ._pictures import prompt
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily, Trace
from .llava_next import GRIDS

PATCH, TILE, SIDE = 4, 16, 2  # four patches a side become two by downsampling
IMAGE = PLAIN
#: (layer of the tower, layer of the language model), and the language layers of two of the four corners' samples.
DEEP, SPATIAL = [[0, 0], [1, 2]], [1, 3]
#: (high, wide) pixels -> the grid it is cut into; half of a grid's sides are padding in the last.
PICTURES: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = (
    ((16, 32), (1, 2)),
    ((32, 32), (2, 2)),
    ((48, 16), (3, 1)),
)


def build() -> nn.Module:
    """Four layers of 64, two vision layers of 64 (one head of 64, as the windows' attention fixes it)."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="granite4_vision",
            image_token_index=IMAGE,
            image_grid_pinpoints=[
                [TILE * rows, TILE * columns] for rows, columns in GRIDS
            ],
            downsample_rate="1/2",
            deepstack_layer_map=DEEP,
            spatial_target_layers=SPATIAL,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                hidden_size=64,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
                embedding_multiplier=3.0,
                attention_multiplier=0.25,
                residual_multiplier=0.8,
                logits_scaling=2.0,
            ),
            vision_config=upstream.VisionConfig(
                num_hidden_layers=2,
                hidden_size=64,
                intermediate_size=64,
                num_attention_heads=2,
                image_size=TILE,
                patch_size=PATCH,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(6.0)),
        Rule("embed_tokens", spread(0.3)),
        Rule(r"(probe|image_newline|\.query|image_positions)$", spread(0.3)),
        Rule(r"out_linear\.weight$", fan_in(0.4)),
    ]
    enliven(model, seed=101, rules=rules, quiet=head)
    return model


def _request(seed: int, sizes: list[int]) -> Inputs:
    pictures = [PICTURES[size] for size in sizes]
    most = max(rows * columns for _, (rows, columns) in pictures) + 1
    tiles = np.zeros((len(pictures), most, 3, TILE, TILE), dtype=np.float32)
    counts = []
    for index, (_, (rows, columns)) in enumerate(pictures):
        tiles[index, : rows * columns + 1] = pixels(
            seed + 31 * index, rows * columns + 1, 3, TILE, TILE
        )
        counts.append(SIDE**2 + rows * SIDE * (columns * SIDE + 1))
    return {
        "input_ids": prompt(seed, [[IMAGE] * count for count in counts]),
        "pixel_values": tiles,
        "image_sizes": np.array([size for size, _ in pictures]),
    }


# One picture of 2, 4 or 3 tiles. Two pictures of different grids.
image, two_images = asks(_request, (0, 1, 2), (2, 0))


def _packed(features: mx.array, grid: tuple[int, int], newline: mx.array) -> mx.array:
    """(1 + tiles, SIDE * SIDE, D) of a picture that fills its grid -> (tokens, D)."""
    rows, columns = grid
    tiles = features[1 : 1 + rows * columns].reshape(rows, columns, SIDE, SIDE, -1)
    plane = tiles.transpose(0, 2, 1, 3, 4).reshape(rows * SIDE, columns * SIDE, -1)
    return mx.concatenate(
        [features[0], *[mx.concatenate([line, newline[None]]) for line in plane]]
    )


def _features(
    model: nn.Module, tiles: mx.array, grid: tuple[int, int]
) -> list[tuple[int, mx.array]]:
    """(language layer, features (tokens, D)) of one picture."""
    with with_tanh_gelu(model):
        *_, states = model.vision_tower(
            tiles.transpose(0, 2, 3, 1), output_hidden_states=True
        )
    deep = [
        (layer, p(states[seen]))
        for p, (seen, layer) in zip(model.layerwise_projectors, DEEP, strict=True)
    ]
    spatial = [
        (layer, p(states[-1]))
        for p, layer in zip(model.spatial_projectors, SPATIAL, strict=False)
    ]
    return [
        (layer, _packed(found, grid, model.image_newline))
        for layer, found in deep + spatial
    ]


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step over the model's own layers, features added before theirs."""
    arrays: dict[str, Any] = to_mx(inputs)
    language = model.language_model
    trunk = language.model
    prompt = trunk.embed_tokens(arrays["input_ids"])
    is_picture = arrays["input_ids"] == IMAGE
    sets: list[tuple[int, mx.array]] = []
    if "pixel_values" in arrays:
        grids = dict(PICTURES)
        pictures = [
            _features(model, tiles, grids[tuple(size)])
            for tiles, size in zip(
                arrays["pixel_values"], inputs["image_sizes"].tolist(), strict=True
            )
        ]
        sets = [
            (one[0][0], mx.concatenate([found for _, found in one]))
            for one in zip(*pictures, strict=True)
        ]
    places = mx.array(np.flatnonzero(np.array(is_picture[0])))

    def logits(generated: list[int]) -> mx.array:
        tail = trunk.embed_tokens(mx.array([generated], dtype=mx.int32))
        hidden = mx.concatenate(
            [mx.where(is_picture[..., None], 0, prompt), tail], axis=1
        )
        hidden = hidden * trunk.embedding_multiplier
        for index, layer in enumerate(trunk.layers):
            for target, found in sets:
                if target == index:
                    hidden[:, places] = hidden[:, places] + found[None]
            hidden = layer(hidden, "causal")
        return language.lm_head(trunk.norm(hidden[:, -1]))[0] / language.logits_scaling

    return generate_by_recomputing(logits, num_tokens)


FAMILY = TinyFamily(
    name="granite4_vision",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="The whole sequence at each step over the model's own layers. mlx-vlm's loop encodes the first picture only, "
    "and its tower has another GELU. transformers agrees with what is here (tests/references).",
)
