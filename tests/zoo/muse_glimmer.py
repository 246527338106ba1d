"""Muse Glimmer: sliding layers with RoPE, full ones without, gated attention, norms that count from one, capped logits."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import muse_glimmer as upstream

from . import _qwen
from ._build import Rule, enliven, fan_in, spread, text_request
from ._oracle import generate_alone
from ._qwen import image, two_images
from ._types import END_OF_TEXT, VOCABULARY, TinyFamily

WINDOW = 8


def build() -> nn.Module:
    """Four layers of 64, two vision layers of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            image_token_id=_qwen.IMAGE,
            video_token_id=_qwen.VIDEO,
            out_hidden_size=128,
            projector_hidden_size=64,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                max_position_embeddings=512,
                sliding_window=WINDOW,
                rope_parameters={"rope_theta": 100.0, "rope_type": "default"},
                layer_types=["sliding_attention", "full_attention"] * 2,
                qk_scale_factor=2.0,
                output_multiplier=1.0,
                eos_token_id=END_OF_TEXT,
            ),
            vision_config=upstream.VisionConfig(
                patch_size=_qwen.PATCH,
                pos_emb_height=4,
                pos_emb_width=4,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=2,
                num_hidden_layers=2,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"language_model\..*layernorm\.weight$", spread(0.2)),
        Rule(r"pos(ition)?_emb", spread(0.5)),
    ]
    enliven(model, seed=42, rules=rules, quiet=head)
    return model


FAMILY = TinyFamily(
    name="muse_glimmer",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    window=WINDOW,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step; transformers agrees (tests/references).",
)
