"""Qwen3-VL: interleaved mRoPE, learned vision positions interpolated to the grid, deepstack features."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import qwen3_vl as upstream

from . import _qwen, _videos
from ._build import Rule, enliven, fan_in, text_request
from ._qwen import image, two_images
from ._types import END_OF_TEXT, VOCABULARY, TinyFamily


def build() -> nn.Module:
    """Four layers of 64; both vision blocks feed deepstack, into the first two layers."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="qwen3_vl",
            vocab_size=VOCABULARY,
            eos_token_id=[END_OF_TEXT],
            image_token_id=_qwen.IMAGE,
            video_token_id=_qwen.VIDEO,
            vision_start_token_id=_qwen.VISION_START,
            vision_end_token_id=_qwen.VISION_END,
            text_config=upstream.TextConfig(
                model_type="qwen3_vl",
                num_hidden_layers=4,
                hidden_size=64,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                rms_norm_eps=1e-6,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
                max_position_embeddings=1024,
                rope_scaling={"type": "default", "mrope_section": [4, 2, 2]},
            ),
            vision_config=upstream.VisionConfig(
                depth=2,
                hidden_size=32,
                intermediate_size=64,
                out_hidden_size=64,
                num_heads=2,
                patch_size=_qwen.PATCH,
                spatial_patch_size=_qwen.PATCH,
                spatial_merge_size=_qwen.MERGE,
                temporal_patch_size=_qwen.TEMPORAL_PATCH,
                num_position_embeddings=25,
                deepstack_visual_indexes=[0, 1],
            ),
        )
    )
    head = "language_model.lm_head.weight"
    enliven(model, seed=3, rules=[Rule(head, fan_in(3.0))], quiet=head)
    return model


FAMILY = TinyFamily(
    name="qwen3_vl",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=_videos.greedy,
    oracle_note="mlx-vlm's generate_step with a clean language model; tests.zoo._videos where there is a video: "
    "transformers agrees (tests/references).",
    video=_qwen.stamped_video_request,
    picture_and_video=_qwen.stamped_picture_and_video,
)
