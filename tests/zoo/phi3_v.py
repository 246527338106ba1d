"""Phi-3-Vision: short and long RoPE factors, placeholders that are negative ids. The tower is a stand-in."""

from __future__ import annotations

from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.phi3_v import config as upstream
from mlx_vlm.models.phi3_v.phi3_v import Model

from ._build import Rule, asks, enliven, fan_in, ids, pixels, text_request, words
from ._oracle import generate_alone
from ._types import END_OF_TEXT, VOCABULARY, Inputs, TinyFamily

CROP = 336
CHANNELS = 8
GRIDS = ((1, 1), (1, 2), (2, 2))  # crops (high, wide) besides the whole picture
# texts of up to 26 tokens begin below it, some pass it while they answer, one begins beyond it
ORIGINAL_LENGTH = 32
SHORT = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]
LONG = [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]


class Tower(nn.Module):
    """In the place of CLIP, whose 336 pixels, 1,024 channels and 144 tokens a crop are written into the class."""

    def __init__(self, config: upstream.ModelConfig) -> None:
        super().__init__()
        self.project = nn.Linear(CHANNELS, config.hidden_size)

    def __call__(
        self,
        pixel_values: mx.array,
        embeds: mx.array,
        sizes: mx.array,
        positions: list[list[int]],
    ) -> mx.array:
        """Features of (N, most features, channels) into the embeddings, one picture's placeholders after another's."""
        done = 0
        for features, (high, wide) in zip(
            self.project(pixel_values), np.array(sizes // CROP).tolist(), strict=True
        ):
            row, start = positions[done]
            count = num_features(high, wide)
            embeds[row, start : start + count] = features[:count]
            done += count
        return embeds


def num_features(high: int, wide: int) -> int:
    """As `processing_phi3_v.py` counts them, with one token a crop instead of 144: rows end in a separator."""
    return high * (wide + 1) + 1 + 2


def build() -> nn.Module:
    """Four layers of 64."""
    config = upstream.ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=4,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_theta=100.0,
        rope_scaling={"type": "su", "short_factor": SHORT, "long_factor": LONG},  # type: ignore[dict-item]
        max_position_embeddings=512,
        vision_config=upstream.VisionConfig(num_img_tokens=1),
        original_max_position_embeddings=ORIGINAL_LENGTH,
        eos_token_id=[END_OF_TEXT],
    )
    with mock.patch("mlx_vlm.models.phi3_v.phi3_v.VisionModel", Tower):
        model = Model(config)
    head = "lm_head.weight"
    enliven(model, seed=21, rules=[Rule(head, fan_in(3.0))], quiet=head)
    return model


def _request(seed: int, grids: list[tuple[int, int]]) -> Inputs:
    parts = [words(seed, 3)]
    for index, grid in enumerate(grids):
        parts += [
            [-1 - index] * num_features(*grid),
            words(seed + 101 * (index + 1), 5),
        ]
    most = max(num_features(*grid) for grid in grids)
    return {
        "input_ids": ids(*parts),
        "pixel_values": pixels(seed, len(grids), most, CHANNELS),
        "image_sizes": np.array(
            [[CROP * high, CROP * wide] for high, wide in grids], dtype=np.int32
        ),
    }


# One picture of 5, 6 or 9 placeholders. Two pictures, whose placeholders are -1 and -2.
image, two_images = asks(_request, GRIDS, (GRIDS[1], GRIDS[0]))


FAMILY = TinyFamily(
    name="phi3_v",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step, its prompt in one chunk. The tower is a linear stand-in: the real one's sizes "
    "are constants of its class. The merging of features and the whole language side are the real ones.",
    no_pictures_recorded="transformers has the language model (Phi3) and not the family, which is remote code",
)
