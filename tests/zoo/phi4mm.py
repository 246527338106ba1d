"""Phi-4-multimodal: one id a picture that becomes as many embeddings as it has patches; partial, long RoPE."""

from __future__ import annotations

import mlx.nn as nn
import numpy as np
from mlx_vlm.models import phi4mm as upstream
from mlx_vlm.models.phi4mm.config import VisionConfig

from ._build import Rule, asks, enliven, fan_in, ids, pixels, spread, text_request, words
from ._oracle import generate_alone
from ._types import END_OF_TEXT, VOCABULARY, Inputs, TinyFamily
from .phi3_v import LONG, ORIGINAL_LENGTH, SHORT

IMAGE = -200
PATCH, MOST_PATCHES = 4, 12
GRIDS = ((2, 2), (2, 3), (3, 4))  # patches (high, wide)


def build() -> nn.Module:
    """Four layers of 64, three vision blocks of 32 (the last is not used), one audio block that nothing reaches."""
    model = upstream.Model(
        upstream.ModelConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=4,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_theta=100.0,
            rope_scaling={"type": "longrope", "short_factor": SHORT[:6], "long_factor": LONG[:6]},  # type: ignore[dict-item]
            max_position_embeddings=512,
            original_max_position_embeddings=ORIGINAL_LENGTH,
            mm_hidden_size=32,
            eos_token_id=[END_OF_TEXT],
            tie_word_embeddings=False,
            vision_config=VisionConfig(
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=2,
                num_hidden_layers=3,
                patch_size=PATCH,
                image_size=4 * PATCH,
            ),
            audio_processor={
                "config": {
                    "attention_dim": 16,
                    "attention_heads": 2,
                    "num_blocks": 1,
                    "linear_units": 16,
                    "input_size": 16,
                    "ext_pw_out_channel": 16,
                    "depthwise_seperable_out_channel": 16,
                    "conv_channels": 8,
                    "t5_bias_max_distance": 8,
                }
            },
        )
    )
    head = "language_model.lm_head.weight"
    rules = [Rule(head, fan_in(3.0)), Rule(r"^audio_", spread(0.1))]
    enliven(model, seed=22, rules=rules, quiet=head)
    return model


def _request(seed: int, grids: list[tuple[int, int]]) -> Inputs:
    parts = [words(seed, 3)]
    values = np.zeros((len(grids), MOST_PATCHES, 3 * PATCH * PATCH), dtype=np.float32)
    mask = np.zeros((len(grids), MOST_PATCHES), dtype=bool)
    for index, (high, wide) in enumerate(grids):
        parts += [[IMAGE], words(seed + 101 * (index + 1), high * wide // 2)]
        values[index, : high * wide] = pixels(seed + 31 * index, high * wide, 3 * PATCH * PATCH)
        mask[index, : high * wide] = True
    return {
        "input_ids": ids(*parts),
        "pixel_values": values,
        "pixel_attention_mask": mask,
        "spatial_shapes": np.array(grids, dtype=np.int32),
    }


# One picture of 4, 6 or 12 patches, padded to the most. Two pictures of different sizes.
image, two_images = asks(_request, GRIDS, (GRIDS[2], GRIDS[0]))


FAMILY = TinyFamily(
    name="phi4mm",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step, its prompt in one chunk.",
    no_reference="transformers cuts a picture into crops and joins them with separators; mlx-vlm drops those weights "
    "(phi4mm.py, sanitize: glb_GN and sub_GN) and feeds plain patches",
)
