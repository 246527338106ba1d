"""Kimi K2.5: DeepSeek-V3 text that attends over the latent itself, MoonViT."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import kimi_k25 as upstream

from ._build import enliven, text_request
from ._deepseek import HEAD, IMAGE, LATENT, TEXT
from ._kimi import VISION, VISION_RULES, greedy, image, small_table, two_images
from ._types import END_OF_TEXT, VOCABULARY, TinyFamily


def build() -> nn.Module:
    """Four layers of 64, the last three of four experts (one group of them, as published)."""
    return made(seed=61, n_group=1, topk_group=1)


def made(seed: int, **groups: int) -> nn.Module:
    """The model with experts in groups."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="kimi_k25",
            vocab_size=VOCABULARY,
            media_placeholder_token_id=IMAGE,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                **{**TEXT, **LATENT, **groups}, num_key_value_heads=4
            ),
            vision_config=upstream.VisionConfig(**VISION),
        )
    )
    small_table(model)
    enliven(model, seed=seed, rules=VISION_RULES, quiet=HEAD)
    return model


FAMILY = TinyFamily(
    name="kimi_k25",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    wrong_alone=("image_2",),
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step with the tower's published activation and rule for positions; transformers agrees "
    "(tests/references).",
)
