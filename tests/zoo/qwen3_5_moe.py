"""Qwen3.5 with experts: as Qwen3.5, every layer with four experts of which two answer, and a gated shared one."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import qwen3_5_moe as upstream

from . import _qwen, _videos
from ._build import enliven, text_request
from ._qwen import image, two_images
from ._types import TinyFamily
from .qwen3_5 import HEAD, MARKERS, RULES, TEXT, VISION, rope


def build() -> nn.Module:
    """Four layers of 64: two recurrent, two with attention; two vision blocks of 32."""
    text = upstream.TextConfig(
        model_type="qwen3_5_moe_text",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
        rope_parameters=rope(),
        **TEXT,
    )
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="qwen3_5_moe",
            text_config=text,
            vision_config=upstream.VisionConfig(**VISION),
            **MARKERS,
        )
    )
    enliven(model, seed=36, rules=RULES, quiet=HEAD)
    return model


FAMILY = TinyFamily(
    name="qwen3_5_moe",
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
