"""LLaVA 1.5: a CLIP tower's second last layer without its class token, one size of picture, Llama text."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import llava as upstream

from ._build import Rule, enliven, fan_in, pixels, spread, text_request
from ._oracle import generate_alone
from ._pictures import prompt
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

SIDE, PATCH = 16, 4
TOKENS = (SIDE // PATCH) ** 2
IMAGE = PLAIN


def build() -> nn.Module:
    """Four layers of 64, three vision layers of 32 of which two count."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="llava",
            image_token_index=IMAGE,
            vocab_size=VOCABULARY,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                model_type="llama",
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
                image_size=SIDE,
                patch_size=PATCH,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    enliven(
        model,
        seed=21,
        rules=[Rule(head, fan_in(3.0)), Rule("class_embedding", spread(0.5))],
        quiet=head,
    )
    return model


def _request(seed: int, num_images: int, num_words: int) -> Inputs:
    return {
        "input_ids": prompt(seed, [[IMAGE] * TOKENS] * num_images, num_words),
        "pixel_values": pixels(seed, num_images, 3, SIDE, SIDE),
    }


def image(seed: int, size: int) -> Inputs:
    """One picture, always of as many placeholders, and 4, 7 or 10 words after it."""
    return _request(seed, 1, 4 + 3 * size)


def two_images(seed: int) -> Inputs:
    """Two pictures."""
    return _request(seed, 2, 4)


FAMILY = TinyFamily(
    name="llava",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step; transformers agrees (tests/references).",
)
