"""LLM-jp-VL: Qwen3 text behind SigLIP with pixel shuffle."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import llmjpvl as upstream

from ._build import Rule, asks, enliven, fan_in, ids, pixels, text_request, words
from ._oracle import generate_alone
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

IMAGE, START, END = PLAIN, PLAIN + 1, PLAIN + 2
SIDE, PATCH = 4, 4
TOKENS_PER_TILE = (SIDE // 2) ** 2
NUM_TILES = (1, 2, 4)


def build() -> nn.Module:
    """Four layers of 64, two vision layers of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="llmjpvl",
            image_token_index=IMAGE,
            vocab_size=VOCABULARY,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                model_type="qwen3",
                hidden_size=64,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
            ),
            vision_config=upstream.VisionConfig(
                hidden_size=32,
                num_attention_heads=2,
                num_hidden_layers=2,
                intermediate_size=64,
                patch_size=PATCH,
                image_size=SIDE * PATCH,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    enliven(model, seed=39, rules=[Rule(head, fan_in(3.0))], quiet=head)
    return model


def _request(seed: int, tiles: list[int]) -> Inputs:
    parts = [words(seed, 3)]
    for index, count in enumerate(tiles):
        parts += [
            [START, *[IMAGE] * (count * TOKENS_PER_TILE), END],
            words(seed + 101 * (index + 1), 4),
        ]
    return {
        "input_ids": ids(*parts),
        "pixel_values": pixels(seed, sum(tiles), 3, SIDE * PATCH, SIDE * PATCH),
    }


# One picture of 1, 2 or 4 tiles. Pictures of two tiles and of one.
image, two_images = asks(_request, NUM_TILES, (2, 1))


FAMILY = TinyFamily(
    name="llmjpvl",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step.",
    no_pictures_recorded="transformers has the language model (Qwen3) and not the family",
)
