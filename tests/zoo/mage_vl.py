"""Mage-VL: Qwen3 behind a vision tower with three-axis rotary positions."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models.mage_vl import config as upstream_config
from mlx_vlm.models.mage_vl import mage_vl as upstream

from . import _qwen
from ._build import Rule, asks, enliven, fan_in, text_request
from ._oracle import generate_alone
from ._types import END_OF_TEXT, VOCABULARY, TinyFamily


def build() -> nn.Module:
    """Four layers of 64, two vision blocks of 64."""
    model = upstream.Model(
        upstream_config.ModelConfig(
            image_token_id=_qwen.IMAGE,
            video_token_id=_qwen.VIDEO,
            vision_start_token_id=_qwen.VISION_START,
            vision_end_token_id=_qwen.VISION_END,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream_config.TextConfig(
                hidden_size=64,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                vocab_size=VOCABULARY,
                max_position_embeddings=1024,
                rope_theta=100.0,
            ),
            vision_config=upstream_config.VisionConfig(
                # heads of 32 are the least that the rotary split of 4:6:6 allows
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                patch_size=_qwen.PATCH,
                image_size=_qwen.PATCH * 4,
                out_hidden_size=64,
                text_hidden_size=64,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    enliven(model, seed=40, rules=[Rule(head, fan_in(3.0))], quiet=head)
    return model


image, two_images = asks(_qwen.still_request, _qwen.GRIDS, _qwen.PAIR)


FAMILY = TinyFamily(
    name="mage_vl",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step.",
    no_pictures_recorded="transformers has the language model (Qwen3) and not the family",
)
