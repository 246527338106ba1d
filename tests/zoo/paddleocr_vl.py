"""PaddleOCR-VL: three-axis positions; patches come unmerged, as pictures of their own, in reading order."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.nn as nn
from mlx_vlm.models import paddleocr_vl as upstream

from . import _qwen
from ._build import Rule, asks, enliven, fan_in, pixels, text_request
from ._oracle import generate_alone
from ._types import END_OF_TEXT, VOCABULARY, Inputs, TinyFamily, Trace


def build() -> nn.Module:
    """Four layers of 64, two vision blocks of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            image_token_id=_qwen.IMAGE,
            video_token_id=_qwen.VIDEO,
            vision_start_token_id=_qwen.VISION_START,
            vision_end_token_id=_qwen.VISION_END,
            eos_token_id=END_OF_TEXT,
            text_config=upstream.TextConfig(
                hidden_size=64,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                vocab_size=VOCABULARY,
                max_position_embeddings=1024,
                rope_theta=100.0,
                use_bias=False,
                rope_scaling={
                    "type": "default",
                    "rope_type": "default",
                    "mrope_section": [2, 3, 3],
                },
            ),
            vision_config=upstream.VisionConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=_qwen.PATCH * 4,
                patch_size=_qwen.PATCH,
            ),
        )
    )
    # The class fixes the projector's width at the published model's 1024 (paddleocr_vl/vision.py:334).
    model.visual.projector.linear_2 = nn.Linear(32 * _qwen.MERGE**2, 64)
    head = "language_model.lm_head.weight"
    enliven(model, seed=21, rules=[Rule(head, fan_in(3.0))], quiet=head)
    return model


def request(seed: int, grids: Sequence[_qwen.Grid]) -> Inputs:
    """As Qwen's prompt; pixels are (1, patches, channels, high, wide)."""
    flat = pixels(
        seed, 1, sum(high * wide for high, wide in grids), 3, _qwen.PATCH, _qwen.PATCH
    )
    return {**_qwen.request(seed, grids), "pixel_values": flat}


image, two_images = asks(request, _qwen.GRIDS, _qwen.PAIR)


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's loop over a projector with the published model's epsilon."""
    norm = model.visual.projector.pre_norm
    before, norm.eps = norm.eps, 1e-5
    try:
        return generate_alone(model, inputs, num_tokens)
    finally:
        norm.eps = before


FAMILY = TinyFamily(
    name="paddleocr_vl",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step, unchunked (its positions are lost after a first chunk), with a clean language "
    "model and the projector's epsilon of 1e-5; transformers agrees (tests/references).",
)
