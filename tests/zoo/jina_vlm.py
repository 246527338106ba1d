"""Jina VLM: features are added to the tokens that an index names; RoPE and norms written out; cross-attended pooling."""

from __future__ import annotations

import mlx.nn as nn
import numpy as np
from mlx_vlm.models.jina_vlm import config as upstream
from mlx_vlm.models.jina_vlm.jina_vlm import Model

from ._build import (
    Rule,
    asks,
    enliven,
    fan_in,
    ids,
    pixels,
    spread,
    text_request,
    words,
)
from ._oracle import generate_alone
from ._types import END_OF_TEXT, VOCABULARY, Inputs, TinyFamily

NEW_IDS = 16
PATCH_TOKEN, COLUMN, START, END = (VOCABULARY + index for index in range(4))
SIDE, PATCH = 4, 4  # patches a side of a crop, pixels a side of a patch
NUM_CROPS = (1, 2, 3)
PADDING = -100  # the index of a feature that is added to no token


def build() -> nn.Module:
    """Four layers of 64, three vision layers of 32 of which two are read; the head knows no picture ids."""
    model = Model(
        upstream.ModelConfig(
            vocab_size=VOCABULARY,
            eos_token_id=END_OF_TEXT,
            image_token_index=PATCH_TOKEN,
            image_token_id=PATCH_TOKEN,
            image_patch_token_id=PATCH_TOKEN,
            image_column_token_id=COLUMN,
            image_start_token_id=START,
            image_end_token_id=END,
            text_config=upstream.TextConfig(
                hidden_size=64,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                vocab_size=VOCABULARY,
                additional_vocab_size=NEW_IDS,
                intermediate_size=96,
                rope_theta=100.0,
                max_position_embeddings=512,
            ),
            vision_config=upstream.VisionConfig(
                hidden_size=32,
                num_hidden_layers=3,
                num_attention_heads=2,
                head_dim=16,
                patch_size=PATCH,
                image_size=SIDE * PATCH,
                intermediate_size=64,
                vit_layers=(-2, -4),
                output_size=64,
                connector_hidden_size=48,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"embedding$", spread(1.0)),
        Rule(r"pad_embed$|pos_embed$", spread(0.5)),
        Rule(r"(norm|ln_f)\d?\.weight$", spread(0.2, 1.0)),
    ]
    enliven(model, seed=33, rules=rules, quiet=head)
    return model


def _request(seed: int, pictures: list[int]) -> Inputs:
    parts, index, length = [words(seed, 3)], [], 3
    for number, crops in enumerate(pictures):
        tokens = [START]
        for _ in range(crops):
            for _ in range(2):
                index += [length + len(tokens), length + len(tokens) + 1]
                tokens += [PATCH_TOKEN, PATCH_TOKEN, COLUMN]
        parts += [[*tokens, END], words(seed + 101 * (number + 1), 4)]
        length += len(tokens) + 5
    index[-1] = PADDING
    masks = np.ones((sum(pictures), SIDE**2), dtype=np.float32)
    masks[-1, -1], masks[-1, -2] = 0.0, 0.5
    return {
        "input_ids": ids(*parts),
        "pixel_values": pixels(seed, sum(pictures), SIDE**2, 3 * PATCH**2),
        "image_input_idx": np.array(index, dtype=np.int32).reshape(sum(pictures), -1),
        "image_masks": masks,
    }


# A picture of 1, 2 or 3 crops; the last feature is padding, and so are some of the last crop's patches. Pictures of
# two crops and of one.
image, two_images = asks(_request, NUM_CROPS, (2, 1))


FAMILY = TinyFamily(
    name="jina_vlm",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step.",
    no_reference="transformers has no class of this family",
)
