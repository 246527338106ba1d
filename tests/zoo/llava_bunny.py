"""Bunny: a SigLIP tower of exactly 729 patches, so features are given; Qwen2 text with the head inside its trunk."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import llava_bunny as upstream

from ._build import Rule, enliven, fan_in, spread
from ._cached import HIDDEN, IMAGE, tiny
from ._types import END_OF_TEXT, VOCABULARY


def build() -> nn.Module:
    """Four layers of 64, one vision layer of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="llava_bunny",
            auto_map={},
            hidden_size=HIDDEN,
            mm_hidden_size=32,
            image_token_index=IMAGE,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                model_type="qwen2",
                hidden_size=HIDDEN,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                rms_norm_eps=1e-6,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
            ),
            vision_config=upstream.VisionConfig(
                model_type="siglip_vision_model",
                num_hidden_layers=1,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=2,
                image_size=8,
                patch_size=4,
            ),
        )
    )
    head = "language_model.model.lm_head.weight"
    enliven(
        model,
        seed=81,
        rules=[Rule(head, fan_in(3.0)), Rule(r"\.probe$", spread(0.5))],
        quiet=head,
    )
    return model


FAMILY = tiny(
    "llava_bunny",
    build,
    oracle_note="The whole sequence at each step over mlx-vlm's language model, features put in here; with one picture "
    "mlx-vlm's loop agrees (tests/test_zoo.py). The placeholder is a token here and -200 in the checkpoints.",
)
