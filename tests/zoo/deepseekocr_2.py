"""DeepSeek-OCR-2: as DeepSeek-OCR without newlines; crops and the whole view go through a small language model."""

from __future__ import annotations

from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import deepseekocr_2 as upstream

from . import _deepseek
from ._build import enliven, ids, pixels, text_request, words
from ._oracle import generate_alone
from ._types import END_OF_TEXT, Inputs, TinyFamily, Trace

TILES = ((1, 1), (1, 2), (2, 2))
FEATURES = _deepseek.SIDE**2


class Encoder(nn.Module):
    """In the place of the Qwen2 encoder, whose 256 and 144 queries are written into it: SAM's features, projected."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.project = nn.Linear(32, 32)

    def __call__(self, x: mx.array, features: mx.array) -> mx.array:
        """(N, h, w, D) -> (N, h w, D)"""
        return self.project(features.flatten(1, 2))


def build() -> nn.Module:
    """Four layers of 64, the last three of four experts."""
    with mock.patch.multiple(
        "mlx_vlm.models.deepseekocr_2.deepseekocr_2",
        SAMEncoder=_deepseek.sam,
        VisionModel=Encoder,
    ):
        model = upstream.Model(
            upstream.ModelConfig(
                model_type="deepseekocr_2",
                image_token_index=_deepseek.IMAGE,
                eos_token_id=[END_OF_TEXT],
                text_config=upstream.TextConfig(
                    **_deepseek.TEXT, num_key_value_heads=4
                ),
                vision_config=upstream.VisionConfig(model_type="vision"),
                projector_config=upstream.ProjectorConfig(input_dim=32, n_embed=64),
            )
        )
    enliven(model, seed=28, rules=_deepseek.RULES, quiet=_deepseek.HEAD)
    return model


def image(seed: int, size: int) -> Inputs:
    """One picture of its whole view alone, or of 2 or 4 crops and the whole view."""
    high, wide = TILES[size]
    num_crops = high * wide if high * wide > 1 else 0
    tokens = ids(
        words(seed, 3),
        [_deepseek.IMAGE] * (FEATURES * (num_crops + 1) + 1),
        words(seed + 101, 5),
    )
    view, crop = _deepseek.VIEW, _deepseek.CROP
    crops = (
        pixels(seed, num_crops, 3, crop, crop)
        if num_crops
        else np.zeros((1, 3, crop, crop), dtype=np.float32)
    )
    return {
        "input_ids": tokens,
        "pixel_values": [crops, pixels(seed + 31, 1, 3, view, view)],
        "images_seq_mask": tokens == _deepseek.IMAGE,
        "images_spatial_crop": np.array([[wide, high]], dtype=np.int32),
    }


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's own loop, with the published positions."""
    with _deepseek.resized_as_published():
        return generate_alone(model, inputs, num_tokens)


FAMILY = TinyFamily(
    name="deepseekocr_2",
    build=build,
    text=text_request,
    image=image,
    two_images=None,
    no_two_images="mlx-vlm fills the first picture's placeholders only (deepseekocr_2.py:95)",
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step with SAM's positions resized as torch does. The encoder behind SAM, whose numbers of "
    "queries are written into it, is a linear stand-in (here and in tests/references, where transformers agrees); SAM, the "
    "projector, the order of views and the language side are the real ones.",
    wrong_alone=("image_1",),
)
