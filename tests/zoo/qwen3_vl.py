"""Qwen3-VL: interleaved mRoPE, learned vision positions interpolated to the grid, deepstack features."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import qwen3_vl as upstream

from . import _qwen, _videos
from ._build import Rule, enliven, fan_in, text_request
from ._qwen import image, two_images
from ._types import TinyFamily


def build() -> nn.Module:
    """Four layers of 64; both vision blocks feed deepstack, into the first two layers."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="qwen3_vl",
            **_qwen.MARKERS,
            vision_end_token_id=_qwen.VISION_END,
            text_config=upstream.TextConfig(model_type="qwen3_vl", **_qwen.QWEN3_TEXT),
            vision_config=upstream.VisionConfig(**_qwen.QWEN3_VISION),
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
