"""Youtu-VL: attention over a latent, dense layers, a vision tower with windows."""

from __future__ import annotations

import mlx.nn as nn
import numpy as np
from mlx_vlm.models import youtu_vl as upstream

from ._build import Rule, asks, enliven, fan_in, ids, pixels, text_request, words
from ._deepseek import LATENT, heads
from ._oracle import generate_alone
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

IMAGE = PLAIN
PATCH = 4
GRIDS = ((4, 4), (4, 6), (6, 8))


def build() -> nn.Module:
    """Four layers of 64, two vision layers of 32 of which the second sees whole pictures."""
    model = upstream.Model(
        upstream.ModelConfig(
            vocab_size=VOCABULARY,
            image_token_id=IMAGE,
            video_token_id=PLAIN + 1,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                **LATENT,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=4,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
                max_position_embeddings=512,
                tie_word_embeddings=False,
            ),
            vision_config=upstream.VisionConfig(
                hidden_size=32,
                out_hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                patch_size=PATCH,
                window_size=4 * PATCH,
                fullatt_block_indexes=[1],
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [Rule(head, fan_in(3.0)), Rule(r"embed_q\.|unembed_out\.", heads)]
    enliven(model, seed=32, rules=rules, quiet=head)
    return model


def _request(seed: int, grids: list[tuple[int, int]]) -> Inputs:
    parts = [words(seed, 3)]
    for index, (high, wide) in enumerate(grids):
        parts += [
            [IMAGE] * (high * wide // 4),
            words(seed + 101 * (index + 1), 4 + index),
        ]
    return {
        "input_ids": ids(*parts),
        "pixel_values": pixels(
            seed, sum(high * wide for high, wide in grids), 3 * PATCH * PATCH
        ),
        "spatial_shapes": np.array(grids, dtype=np.int32),
    }


# One picture of 4, 6 or 12 placeholders. Two pictures of different grids.
image, two_images = asks(_request, GRIDS, (GRIDS[1], GRIDS[0]))


FAMILY = TinyFamily(
    name="youtu_vl",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step.",
    no_pictures_recorded="transformers has the language model (Youtu) and not the family",
)
