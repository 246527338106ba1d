"""LFM2-VL: short convolutions in two layers of four; a SigLIP2 tower over padded patches."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.nn as nn
import numpy as np
from mlx_vlm.models import lfm2_vl as upstream

from ._build import Rule, asks, enliven, ids, pixels, spread, text_request, words
from ._oracle import generate_alone
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

PATCH, FACTOR, MAX_PATCHES = 4, 2, 40
START, END, IMAGE = PLAIN, PLAIN + 1, PLAIN + 2
GRIDS = ((4, 4), (4, 6), (6, 6))
Grid = tuple[int, int]


def build() -> nn.Module:
    """Four layers of 64, convolution and attention in turn; two vision blocks of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="lfm2_vl",
            image_token_id=IMAGE,
            downsample_factor=FACTOR,
            projector_hidden_size=64,
            eos_token_id=END_OF_TEXT,
            text_config=upstream.TextConfig(
                hidden_size=64,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=1024,
                rope_theta=100.0,
                vocab_size=VOCABULARY,
                eos_token_id=END_OF_TEXT,
                block_auto_adjust_ff_dim=False,
                block_dim=64,
                conv_dim=64,
                conv_dim_out=64,
                layer_types=["conv", "full_attention"] * 2,
            ),
            vision_config=upstream.VisionConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                patch_size=PATCH,
                num_patches=16,
            ),
        )
    )
    head = "language_model.model.embed_tokens.weight"
    enliven(model, seed=52, rules=[Rule(head, spread(0.4))], quiet=head)
    return model


def request(seed: int, grids: Sequence[Grid]) -> Inputs:
    """Words, then each picture between its markers followed by words; patches are padded to a common number."""
    parts = [words(seed, 3)]
    flat = np.zeros((len(grids), MAX_PATCHES, 3 * PATCH * PATCH), dtype=np.float32)
    mask = np.zeros((len(grids), MAX_PATCHES), dtype=np.int32)
    for index, (high, wide) in enumerate(grids):
        placeholders = [IMAGE] * (high * wide // FACTOR**2)
        parts += [
            [START, *placeholders, END],
            words(seed + 101 * (index + 1), 4 + index),
        ]
        flat[index, : high * wide] = pixels(
            seed + 31 * index, high * wide, 3 * PATCH * PATCH
        )
        mask[index, : high * wide] = 1
    return {
        "input_ids": ids(*parts),
        "pixel_values": flat,
        "pixel_attention_mask": mask,
        "spatial_shapes": np.array(grids, dtype=np.int32),
    }


# One picture of 4, 6 or 9 placeholders. Two pictures of one grid.
image, two_images = asks(request, GRIDS, (GRIDS[1], GRIDS[1]))


FAMILY = TinyFamily(
    name="lfm2_vl",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step; transformers agrees (tests/references).",
)
