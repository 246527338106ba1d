"""Qwen2-VL: three-axis positions (mRoPE in chunks), a picture of any grid."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import qwen2_vl as upstream

from . import _qwen, _videos
from ._build import Rule, enliven, fan_in, text_request
from ._qwen import image, two_images
from ._types import VOCABULARY, TinyFamily


def build() -> nn.Module:
    """Four layers of 64, two vision blocks of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="qwen2_vl",
            **_qwen.MARKERS,
            text_config=upstream.TextConfig(
                model_type="qwen2_vl",
                hidden_size=64,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                rms_norm_eps=1e-6,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
                rope_scaling=_qwen.MROPE,
            ),
            vision_config=upstream.VisionConfig(
                depth=2,
                embed_dim=32,
                hidden_size=64,
                num_heads=2,
                mlp_ratio=2.0,
                **_qwen.PATCHES,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    enliven(model, seed=2, rules=[Rule(head, fan_in(3.0))], quiet=head)
    return model


FAMILY = TinyFamily(
    name="qwen2_vl",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=_videos.greedy,
    oracle_note="mlx-vlm's generate_step with a clean language model; tests.zoo._videos where there is a video: "
    "transformers agrees (tests/references).",
    video=_qwen.video_request,
    picture_and_video=_qwen.picture_and_video,
    wrong_alone=("picture_and_video",),
)
