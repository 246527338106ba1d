"""Aya Vision: Cohere2 text (sliding layers with RoPE, full layers without any), pictures as crops of one size."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import aya_vision as upstream

from ._build import Rule, asks, enliven, ids, pixels, spread, text_request, words
from ._oracle import generate_alone
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

WINDOW = 8
LOGIT_SCALE = 3.0
CROP, PATCH, DOWNSAMPLE = 16, 4, 2
TOKENS_PER_CROP = (CROP // PATCH // DOWNSAMPLE) ** 2
NUM_CROPS = (1, 3, 5)  # a thumbnail alone, or tiles and then the thumbnail

IMAGE, START, END, TILE, GLOBAL = PLAIN, PLAIN + 1, PLAIN + 2, PLAIN + 3, PLAIN + 9


def build(model_type: str = "aya_vision", seed: int = 4) -> nn.Module:
    """Four layers of 64, sliding and full in turn; the embedding is also the head."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type=model_type,
            image_token_index=IMAGE,
            downsample_factor=DOWNSAMPLE,
            alignment_intermediate_size=96,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                model_type="cohere2",
                hidden_size=64,
                head_dim=16,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                rope_theta=100.0,
                vocab_size=VOCABULARY,
                logit_scale=LOGIT_SCALE,
                sliding_window=WINDOW,
                sliding_window_pattern=2,
            ),
            vision_config=upstream.VisionConfig(
                model_type="siglip_vision_model",
                hidden_size=32,
                num_attention_heads=2,
                patch_size=PATCH,
                num_hidden_layers=2,
                intermediate_size=64,
                image_size=CROP,
            ),
        )
    )
    embedding = "language_model.model.embed_tokens.weight"
    enliven(model, seed=seed, rules=[Rule(embedding, spread(0.125))], quiet=embedding)
    return model


def _picture(num_crops: int) -> list[int]:
    """The ids of one picture, as `AyaVisionProcessor._prompt_split_image` orders them."""
    tiles = [
        token
        for index in range(num_crops - 1)
        for token in [TILE + index, *[IMAGE] * TOKENS_PER_CROP]
    ]
    return [START, *tiles, GLOBAL, *[IMAGE] * TOKENS_PER_CROP, END]


def _request(seed: int, crops: list[int]) -> Inputs:
    parts = [words(seed, 3)]
    for index, num_crops in enumerate(crops):
        parts += [_picture(num_crops), words(seed + 101 * (index + 1), 5)]
    return {
        "input_ids": ids(*parts),
        "pixel_values": pixels(seed, sum(crops), 3, CROP, CROP),
    }


# One picture of 1, 3 or 5 crops. A picture of three crops and one of a single crop.
image, two_images = asks(_request, NUM_CROPS, (3, 1))


FAMILY = TinyFamily(
    name="aya_vision",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    window=WINDOW,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step; transformers agrees once the logit_scale it drops is put back.",
)
