"""Granite Vision: LLaVA-NeXT's packed tiles, two layers of SigLIP side by side, Granite text with its multipliers."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models import granite_vision as upstream

from ._build import Rule, asks, enliven, fan_in, spread, text_request
from ._oracle import generate_from_embeddings, put_pictures, to_mx, with_tanh_gelu
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily, Trace
from .llava_next import PATCH, TILE, Picture, packed_features, tiled_request

IMAGE = PLAIN
LAYERS = [-2, -1]
#: Grids (rows, columns) of which the last two are not LLaVA-NeXT's.
GRIDS = ((1, 2), (2, 1), (2, 3), (4, 1))
PICTURES: tuple[Picture, ...] = (
    ((16, 32), (1, 2)),
    ((32, 40), (2, 3)),
    ((64, 10), (4, 1)),
)


def build() -> nn.Module:
    """Four layers of 64, two vision layers of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="granite_vision",
            image_token_index=IMAGE,
            vision_feature_layer=LAYERS,
            image_grid_pinpoints=[
                [TILE * rows, TILE * columns] for rows, columns in GRIDS
            ],
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
        Rule(head, fan_in(6.0)),
        Rule("embed_tokens", spread(0.3)),
        Rule("image_newline", spread(0.3)),
    ]
    rules += [Rule(r"\.probe$", spread(0.5)), Rule(r"linear_2\.weight$", fan_in(0.4))]
    enliven(model, seed=83, rules=rules, quiet=head)
    return model


def request(seed: int, sizes: list[int], marker: int = IMAGE) -> Inputs:
    """Pictures of the given sizes."""
    return tiled_request(seed, [PICTURES[size] for size in sizes], marker)


# One picture of 2, 6 or 4 tiles. Two pictures of different grids.
image, two_images = asks(request, (0, 1, 2), (2, 0))


def _features(model: nn.Module, tiles: mx.array) -> mx.array:
    """(T, 3, TILE, TILE) -> (T, SIDE * SIDE, D)"""
    with with_tanh_gelu(model):
        *_, states = model.vision_tower(
            tiles.transpose(0, 2, 3, 1), output_hidden_states=True
        )
    return model.multi_modal_projector(
        mx.concatenate([states[layer] for layer in LAYERS], axis=-1)
    )


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step, over pictures packed as for LLaVA-NeXT."""
    arrays: dict[str, Any] = to_mx(inputs)
    embeds = model.language_model.model.embed_tokens(arrays["input_ids"])
    if "pixel_values" in arrays:
        packed = packed_features(
            partial(_features, model), inputs, PICTURES, model.image_newline
        )
        embeds = put_pictures(embeds, arrays["input_ids"], IMAGE, packed)
    return generate_from_embeddings(model, embeds, num_tokens)


FAMILY = TinyFamily(
    name="granite_vision",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="The whole sequence at each step, pictures packed as for LLaVA-NeXT; mlx-vlm packs none. transformers "
    "(LlavaNextForConditionalGeneration, as the published checkpoints) agrees with what is here (tests/references).",
)
