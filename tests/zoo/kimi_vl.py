"""Kimi-VL: DeepSeek-V3 text with keys and values made of the latent, MoonViT."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import kimi_vl as upstream

from ._build import enliven, text_request
from ._deepseek import HEAD, IMAGE, LATENT, TEXT
from ._kimi import VISION, VISION_RULES, greedy, image, small_table, two_images
from ._types import END_OF_TEXT, VOCABULARY, TinyFamily


def build() -> nn.Module:
    """Four layers of 64, the last three of four experts."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="kimi_vl",
            vocab_size=VOCABULARY,
            media_placeholder_token_id=IMAGE,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                **TEXT, **LATENT, num_key_value_heads=4, n_group=1, topk_group=1
            ),
            vision_config=upstream.VisionConfig(**VISION),
        )
    )
    small_table(model)
    enliven(model, seed=30, rules=VISION_RULES, quiet=HEAD)
    return model


FAMILY = TinyFamily(
    name="kimi_vl",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    wrong_alone=("image_2",),
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step with the tower's published activation and rule for positions; transformers agrees "
    "with Kimi K2.5's class (tests/references).",
)
