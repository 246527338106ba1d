"""DeepSeek-VL2: latent attention, experts, a picture as one whole view and tiles with newlines between their rows."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import mlx.nn as nn
import numpy as np
from mlx_vlm.models import deepseek_vl_v2 as upstream
from mlx_vlm.models.deepseek_vl_v2.config import ProjectorConfig

from ._build import Rule, asks, enliven, ids, pixels, spread, text_request, words
from ._deepseek import HEAD, IMAGE, LATENT, RULES, TEXT
from ._oracle import generate_alone
from ._types import END_OF_TEXT, Inputs, TinyFamily, Trace

# patches a side of a view, pixels a side of a patch; the projector joins 2 x 2 patches
SIDE, PATCH = 4, 4
TILES = ((1, 1), (1, 2), (2, 2))


def build() -> nn.Module:
    """Four layers of 64, the last three of four experts."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="deepseek_vl_v2",
            image_token_index=IMAGE,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(**TEXT, **LATENT, num_key_value_heads=4),
            vision_config=upstream.VisionConfig(
                model_type="vision",
                layers=2,
                width=32,
                intermediate_size=64,
                num_attention_heads=2,
                image_size=SIDE * PATCH,
                patch_size=PATCH,
                mlp_ratio=2.0,
            ),
            projector_config=ProjectorConfig(input_dim=32, n_embed=64),
        )
    )
    rules = [
        *RULES,
        Rule(r"pos_embed$", spread(0.5)),
        Rule(r"attn_pool\.", spread(0.1)),
    ]
    enliven(model, seed=26, rules=rules, quiet=HEAD)
    return model


def num_features(high: int, wide: int) -> int:
    """The whole view's rows and the tiles' rows, each with a newline, and a separator between them."""
    side = SIDE // 2
    return side * (side + 1) + 1 + high * side * (wide * side + 1)


def _request(seed: int, tiles: list[tuple[int, int]]) -> Inputs:
    parts = [words(seed, 3)]
    for index, grid in enumerate(tiles):
        parts += [[IMAGE] * num_features(*grid), words(seed + 101 * (index + 1), 5)]
    tokens = ids(*parts)
    views = sum(1 + high * wide for high, wide in tiles)
    return {
        "input_ids": tokens,
        "pixel_values": pixels(seed, 1, views, 3, SIDE * PATCH, SIDE * PATCH),
        "images_seq_mask": tokens == IMAGE,
        "images_spatial_crop": np.array(
            [[[wide, high] for high, wide in tiles]], dtype=np.int32
        ),
    }


# One picture of 1, 2 or 4 tiles besides its whole view. Two pictures of one and two tiles.
image, two_images = asks(_request, TILES, (TILES[1], TILES[0]))


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's own path, turning neighbours, with 1e-6 in the latents' norms, and zeros after the tile counts."""
    if "images_spatial_crop" in inputs:
        crops, views = inputs["images_spatial_crop"], inputs["pixel_values"].shape[1]
        inputs = {
            **inputs,
            "images_spatial_crop": np.pad(
                crops, [(0, 0), (0, views - crops.shape[1]), (0, 0)]
            ),
        }
    attentions = [layer.self_attn for layer in model.language_model.model.layers]
    norms = [
        norm
        for attention in attentions
        for norm in (attention.q_a_layernorm, attention.kv_a_layernorm)
    ]
    changes = [(attention.rope, "traditional", True) for attention in attentions]
    with ExitStack() as stack:
        for module, name, value in [*changes, *((norm, "eps", 1e-6) for norm in norms)]:
            stack.enter_context(mock.patch.object(module, name, value))
        return generate_alone(model, inputs, num_tokens)


FAMILY = TinyFamily(
    name="deepseek_vl_v2",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step on tile counts that end in zeros (deepseek_vl_v2.py:333 reads past them, and what "
    "lies there may drop the picture), and neighbours of a head turned, as in DeepSeek's code and transformers "
    "(deepseek_vl_v2/language.py:150 turns halves); experts are chosen greedily, as in the two smaller published models.",
    wrong_alone=("text", "image_0"),
    no_pictures_recorded="transformers has the language model (DeepseekV2) and not the family, which is remote code",
)
