"""Molmo: rotary attention with fused projections; features are added to the tokens that an index names."""

from __future__ import annotations

import mlx.nn as nn
import numpy as np
from mlx_vlm.models.molmo import config as upstream
from mlx_vlm.models.molmo.molmo import Model

from ._build import Rule, enliven, fan_in, ids, pixels, spread, text_request, words
from ._oracle import generate_alone
from ._types import PLAIN, VOCABULARY, Inputs, TinyFamily

NEW_IDS = 16
PATCH_TOKEN, COLUMN, START, END = (VOCABULARY - NEW_IDS + index for index in range(4))
SIDE, PATCH = 4, 4  # patches a side of a crop, pixels a side of a patch
TOKENS_PER_CROP = (SIDE // 2) ** 2
NUM_CROPS = (1, 2, 3)
PADDING = -100  # the index of a feature that is added to no token


def build() -> nn.Module:
    """Four layers of 64, three vision layers of 32 of which two are read; the head knows no picture ids."""
    model = Model(
        upstream.ModelConfig(
            eos_token_id=[VOCABULARY - NEW_IDS - 1],
            text_config=upstream.TextConfig(
                d_model=64,
                n_heads=4,
                n_kv_heads=2,
                n_layers=4,
                mlp_hidden_size=192,
                vocab_size=VOCABULARY - NEW_IDS,
                embedding_size=VOCABULARY - NEW_IDS,
                additional_vocab_size=NEW_IDS,
                rope_theta=100.0,
            ),
            vision_config=upstream.VisionConfig(
                image_default_input_size=(SIDE * PATCH, SIDE * PATCH),
                image_patch_size=PATCH,
                image_pos_patch_size=PATCH,
                hidden_size=48,
                image_emb_dim=32,
                image_num_heads=2,
                image_num_key_value_heads=2,
                image_num_layers=3,
                image_head_dim=16,
                image_mlp_dim=64,
                image_num_pos=SIDE**2 + 1,
                d_model=64,
                vit_layers=[-1, -3],
            ),
        )
    )
    head = "language_model.model.ff_out.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"embedding$", spread(1.0)),
        Rule(r"pad_embed$", spread(0.5)),
    ]
    enliven(model, seed=23, rules=rules, quiet=head)
    return model


def image(seed: int, size: int) -> Inputs:
    """A picture of 1, 2 or 3 crops before the words; the last crop's last feature is padding, and so is a patch of it."""
    crops = NUM_CROPS[size]
    tokens, index = [START], []
    for _ in range(crops):
        for row in range(2):
            index += [len(tokens), len(tokens) + 1]
            tokens += [PATCH_TOKEN, PATCH_TOKEN, *([COLUMN] if row == 0 else [])]
    index[-1], tokens[-1] = PADDING, END
    masks = np.ones((crops, SIDE**2), dtype=np.float32)
    masks[-1, -1], masks[-1, -2] = 0.0, 0.5
    return {
        "input_ids": ids(tokens, words(seed, 5)),
        "pixel_values": pixels(seed, crops, SIDE**2, 3 * PATCH**2),
        "image_input_idx": np.array(index, dtype=np.int32).reshape(
            crops, TOKENS_PER_CROP
        ),
        "image_masks": masks,
    }


assert PLAIN < VOCABULARY - NEW_IDS - 1

FAMILY = TinyFamily(
    name="molmo",
    build=build,
    text=text_request,
    image=image,
    two_images=None,
    no_two_images="the processor puts one picture before the words and makes further rows for further pictures "
    "(processing_molmo.py, __call__)",
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step.",
    no_reference="transformers has no class of this family (Molmo is remote code)",
)
