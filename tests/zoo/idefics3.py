"""Idefics 3: tiles of one size and then the whole picture, pixels shuffled together by two, Llama text."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_vlm.models import idefics3

from ._build import Rule, asks, enliven, fan_in, pixels, text_request
from ._oracle import generate_alone
from ._pictures import prompt
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

TILE, PATCH, SCALE = 16, 4, 2
TOKENS_PER_TILE = (TILE // PATCH // SCALE) ** 2
NUM_TILES = (1, 3, 5)  # the whole picture alone, or tiles and then the whole
IMAGE, FENCE, PLACE = PLAIN, PLAIN + 1, PLAIN + 2


def build_with(upstream: ModuleType, model_type: str, seed: int) -> nn.Module:
    """Four layers of 64, two vision layers of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type=model_type,
            image_token_id=IMAGE,
            scale_factor=SCALE,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                model_type="llama",
                hidden_size=64,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                rms_norm_eps=1e-5,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
            ),
            vision_config=upstream.VisionConfig(
                model_type="idefics3_vision",
                num_hidden_layers=2,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=2,
                image_size=TILE,
                patch_size=PATCH,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    enliven(model, seed=seed, rules=[Rule(head, fan_in(3.0))], quiet=head)
    return model


def build() -> nn.Module:
    """Idefics 3."""
    return build_with(idefics3, "idefics3", 70)


def _picture(tiles: int) -> list[int]:
    """Each tile after its place in the picture, the whole after a fence (``Idefics3Processor``)."""
    parts = [[FENCE, PLACE + tile, *[IMAGE] * TOKENS_PER_TILE] for tile in range(tiles)]
    return [*[token for part in parts for token in part], FENCE]


def _request(seed: int, tiles: list[int]) -> Inputs:
    total = sum(tiles)
    return {
        "input_ids": prompt(seed, [_picture(number) for number in tiles]),
        "pixel_values": pixels(seed, 1, total, 3, TILE, TILE),
        "pixel_attention_mask": np.ones((1, total, TILE, TILE), dtype=np.int32),
    }


# One picture of 1, 3 or 5 tiles. A picture of three tiles and one of a single tile.
image, two_images = asks(_request, NUM_TILES, (3, 1))


FACTS: dict[str, Any] = {
    "text": text_request,
    "image": image,
    "two_images": two_images,
    "greedy": generate_alone,
    "oracle_note": "mlx-vlm's generate_step; transformers agrees (tests/references).",
}

FAMILY = TinyFamily(name="idefics3", build=build, **FACTS)
