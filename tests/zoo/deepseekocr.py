"""DeepSeek-OCR: plain attention, experts, a picture as crops and then its whole view, through SAM and CLIP."""

from __future__ import annotations

from unittest import mock

import mlx.nn as nn
from mlx_vlm.models import deepseekocr as upstream
from mlx_vlm.models.deepseekocr.config import ProjectorConfig
from mlx_vlm.models.deepseekocr.deepseekocr import Model

from . import _deepseek
from ._build import enliven, text_request
from ._oracle import generate_alone
from ._types import END_OF_TEXT, Inputs, TinyFamily, Trace

TILES = ((1, 1), (1, 2), (2, 2))


def build() -> nn.Module:
    """Four layers of 64, the last three of four experts."""
    with mock.patch("mlx_vlm.models.deepseekocr.deepseekocr.SAMEncoder", _deepseek.sam):
        model = Model(
            upstream.ModelConfig(
                model_type="deepseekocr",
                image_token_index=_deepseek.IMAGE,
                eos_token_id=[END_OF_TEXT],
                text_config=upstream.TextConfig(
                    **_deepseek.TEXT, num_key_value_heads=4
                ),
                vision_config=upstream.VisionConfig(**_deepseek.clip()),
                projector_config=ProjectorConfig(input_dim=64, n_embed=64),
            )
        )
    enliven(model, seed=27, rules=_deepseek.RULES, quiet=_deepseek.HEAD)
    return model


def image(seed: int, size: int) -> Inputs:
    """One picture of one tile, which is the whole view, or of 2 or 4 crops and a whole view."""
    return _deepseek.ocr_request(seed, [TILES[size]])


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's own loop, with the published positions."""
    with _deepseek.clip_as_published(model):
        return generate_alone(model, inputs, num_tokens)


FAMILY = TinyFamily(
    name="deepseekocr",
    build=build,
    text=text_request,
    image=image,
    two_images=None,
    no_two_images="mlx-vlm looks for the second picture's placeholders in a second row (deepseekocr.py:295)",
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step with positions of SAM and CLIP resized as torch does, and CLIP's published epsilon; "
    "transformers agrees, whose class of Unlimited-OCR is this model but for its window (tests/references).",
    wrong_alone=("image_0", "image_1"),
)
