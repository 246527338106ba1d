"""Phi-4 with SigLIP 2: pictures of any shape as a padded list of patches, one id of -200 for each; Phi-3 text."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.nn as nn
import numpy as np
from mlx_vlm.models import phi4_siglip as upstream

from ._build import Rule, enliven, fan_in, pixels, text_request
from ._oracle import generate_alone
from ._pictures import prompt
from ._types import END_OF_TEXT, Inputs, TinyFamily

PATCH, MOST_PATCHES, NO_TOKEN = 4, 12, -200
GRIDS = ((2, 2), (2, 3), (3, 4))
#: More than the zoo's other families have: mlx-vlm looks -200 up in the embedding before it puts the picture there.
VOCABULARY = 256


def build() -> nn.Module:
    """Four layers of 64, three vision layers of 32 of which two count."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="phi4_siglip",
            mm_hidden_size=32,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                hidden_size=64,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
            ),
            vision_config=upstream.VisionConfig(
                num_hidden_layers=3,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=2,
                patch_size=PATCH,
                num_patches=9,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    enliven(model, seed=82, rules=[Rule(head, fan_in(3.0))], quiet=head)
    return model


def _request(seed: int, grids: Sequence[tuple[int, int]], num_words: int) -> Inputs:
    patches = np.zeros((len(grids), MOST_PATCHES, 3 * PATCH * PATCH), dtype=np.float32)
    mask = np.zeros((len(grids), MOST_PATCHES), dtype=np.int32)
    for index, (rows, columns) in enumerate(grids):
        patches[index, : rows * columns] = pixels(seed + 31 * index, rows * columns, 3 * PATCH * PATCH)
        mask[index, : rows * columns] = 1
    return {
        "input_ids": prompt(seed, [[NO_TOKEN]] * len(grids), num_words),
        "pixel_values": patches,
        "pixel_attention_mask": mask,
        "spatial_shapes": np.array(grids, dtype=np.int32),
    }


def image(seed: int, size: int) -> Inputs:
    """One picture of 4, 6 or 12 patches, and 4, 5 or 6 words after it."""
    return _request(seed, [GRIDS[size]], 4 + size)


def two_images(seed: int) -> Inputs:
    """Two pictures of different shapes."""
    return _request(seed, [GRIDS[1], GRIDS[2]], 4)


FAMILY = TinyFamily(
    name="phi4_siglip",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step.",
    no_reference="transformers has no such class",
)
