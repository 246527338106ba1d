"""DeepSeek-OCR: plain attention, experts, a picture as crops and then its whole view. The towers are stand-ins."""

from __future__ import annotations

from unittest import mock

import mlx.nn as nn
from mlx_vlm.models import deepseekocr as upstream
from mlx_vlm.models.deepseekocr.config import ProjectorConfig
from mlx_vlm.models.deepseekocr.deepseekocr import Model

from . import _deepseek
from ._build import enliven, text_request
from ._oracle import generate_alone
from ._types import END_OF_TEXT, Inputs, TinyFamily

TILES = ((1, 1), (1, 2), (2, 2))


def build() -> nn.Module:
    """Four layers of 64, the last three of four experts."""
    with mock.patch.multiple(
        "mlx_vlm.models.deepseekocr.deepseekocr", SAMEncoder=_deepseek.Sam, VisionModel=_deepseek.Clip
    ):
        model = Model(
            upstream.ModelConfig(
                model_type="deepseekocr",
                image_token_index=_deepseek.IMAGE,
                eos_token_id=[END_OF_TEXT],
                text_config=upstream.TextConfig(**_deepseek.TEXT, num_key_value_heads=4),
                vision_config=upstream.VisionConfig(model_type="vision"),
                projector_config=ProjectorConfig(input_dim=64, n_embed=64),
            )
        )
    enliven(model, seed=27, rules=_deepseek.RULES, quiet=_deepseek.HEAD)
    return model


def image(seed: int, size: int) -> Inputs:
    """One picture of one tile, which is the whole view, or of 2 or 4 crops and a whole view."""
    return _deepseek.ocr_request(seed, [TILES[size]])


FAMILY = TinyFamily(
    name="deepseekocr",
    build=build,
    text=text_request,
    image=image,
    two_images=None,
    no_two_images="mlx-vlm looks for the second picture's placeholders in a second row (deepseekocr.py:295)",
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step. SAM and CLIP, whose sizes are constants of their classes, are linear stand-ins; "
    "the projector, the order of crops and views, and the language side are the real ones.",
    no_reference="transformers has no class of this family",
)
