"""Qwen3.5: gated delta nets with a short convolution in three layers of four, attention with a gate in the fourth."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
from mlx_vlm.models import qwen3_5 as upstream

from . import _qwen, _videos
from ._build import Rule, enliven, fan_in, spread, text_request
from ._qwen import image, two_images
from ._types import END_OF_TEXT, VOCABULARY, TinyFamily

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "full_attention_interval": 2,
}

VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": _qwen.PATCH,
    "spatial_patch_size": _qwen.PATCH,
    "spatial_merge_size": _qwen.MERGE,
    "temporal_patch_size": _qwen.TEMPORAL_PATCH,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [],
}

MARKERS: dict[str, Any] = {
    "image_token_id": _qwen.IMAGE,
    "video_token_id": _qwen.VIDEO,
    "vision_start_token_id": _qwen.VISION_START,
    "vision_end_token_id": _qwen.VISION_END,
    "eos_token_id": [END_OF_TEXT],
    "vocab_size": VOCABULARY,
}

HEAD = "language_model.lm_head.weight"
RULES = [
    Rule(HEAD, fan_in(3.0)),
    Rule(r"\.A_log$", spread(0.5, -0.5)),
    Rule(r"\.dt_bias$", spread(0.5, -2.0)),
    Rule(r"in_proj_b", fan_in(0.7)),
    Rule(r"linear_attn\.norm\.weight", spread(0.2, 1.0)),
]


def rope() -> dict[str, Any]:
    """Half of each head turns; a fresh dict, because the configuration changes its keys."""
    return {
        "type": "default",
        "mrope_section": [2, 1, 1],
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
    }


def build() -> nn.Module:
    """Four layers of 64: two recurrent, two with attention; two vision blocks of 32."""
    text = upstream.TextConfig(
        model_type="qwen3_5_text", intermediate_size=96, rope_parameters=rope(), **TEXT
    )
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="qwen3_5",
            text_config=text,
            vision_config=upstream.VisionConfig(**VISION),
            **MARKERS,
        )
    )
    enliven(model, seed=35, rules=RULES, quiet=HEAD)
    return model


FAMILY = TinyFamily(
    name="qwen3_5",
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
