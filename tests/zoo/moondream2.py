"""Moondream 2: BOS and a picture attend to each other both ways; attention and MLP side by side, partial RoPE."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models.moondream2 import config as upstream
from mlx_vlm.models.moondream2.moondream2 import Model

from ._build import Rule, enliven, fan_in, spread
from ._moondream import BOS, ONE_PICTURE, VISION, generate_under_prefix, image, text
from ._types import END_OF_TEXT, VOCABULARY, Inputs, TinyFamily, Trace


def build() -> nn.Module:
    """Four layers of 64."""
    model = Model(
        upstream.ModelConfig(
            eos_token_id=END_OF_TEXT,
            bos_token_id=BOS,
            text_config=upstream.TextConfig(
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=4,
                vocab_size=VOCABULARY,
                num_attention_heads=4,
                num_key_value_heads=4,
                rope_theta=100.0,
            ),
            vision_config=upstream.VisionConfig(**VISION),
        )
    )
    head = "text.lm_head.weight"
    enliven(
        model,
        seed=25,
        rules=[Rule(head, fan_in(3.0)), Rule(r"\.pos_emb$", spread(0.5))],
        quiet=head,
    )
    return model


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step, under the prefix mask when there is a picture."""
    trunk = model.text.model
    return generate_under_prefix(
        model, inputs, num_tokens, trunk.embed_tokens, trunk.layers
    )


FAMILY = TinyFamily(
    name="moondream2",
    build=build,
    text=text,
    image=image,
    two_images=None,
    no_two_images=ONE_PICTURE,
    greedy=greedy,
    oracle_note="As for moondream3: the whole sequence at each step, under the prefix mask that generate_step loses, and "
    "crops averaged as in Moondream's own code.",
    wrong_alone=("image_0", "image_2"),
    no_reference="transformers has no such class; test_moondream_call_agrees stands in",
)
