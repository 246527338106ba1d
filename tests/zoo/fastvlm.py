"""FastVLM: FastViTHD, whose sizes are fixed in the code, so features are given; Qwen2 text."""

from __future__ import annotations

from typing import Any
from unittest import mock

import mlx.nn as nn
from mlx_vlm.models import fastvlm as upstream

from ._build import Rule, enliven, fan_in
from ._cached import HIDDEN, IMAGE, tiny
from ._types import END_OF_TEXT, VOCABULARY


class _Nothing(nn.Module):
    """In the place of the tower: what the model asks for its type."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        block = nn.Module()
        block.reparam_conv = nn.Conv2d(1, 1, 1)
        self.vision_model = nn.Module()
        self.vision_model.patch_embed = nn.Module()
        self.vision_model.patch_embed.blocks = [block]


def build() -> nn.Module:
    """Four layers of 64."""
    text = upstream.TextConfig(
        model_type="qwen2",
        hidden_size=HIDDEN,
        num_hidden_layers=4,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        rope_theta=100.0,
        tie_word_embeddings=False,
    )
    with mock.patch("mlx_vlm.models.fastvlm.fastvlm.VisionModel", _Nothing):
        model = upstream.Model(
            upstream.ModelConfig(
                model_type="fastvlm",
                text_config=text,
                vision_config=upstream.VisionConfig(),
                image_token_index=IMAGE,
                eos_token_id=END_OF_TEXT,
                mm_hidden_size=32,
            )
        )
    head = "language_model.lm_head.weight"
    enliven(model, seed=80, rules=[Rule(head, fan_in(3.0))], quiet=head)
    return model


FAMILY = tiny(
    "fastvlm",
    build,
    oracle_note="The whole sequence at each step over mlx-vlm's language model, features put in here; with one picture "
    "mlx-vlm's loop agrees (tests/test_zoo.py). The placeholder is a token here and -200 in the checkpoints.",
    no_pictures_recorded="transformers' class has another tower; mlx-vlm's loop with one picture stands in",
)
