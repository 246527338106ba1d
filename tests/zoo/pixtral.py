"""Pixtral: pictures of any size in one sequence of patches with rotations for rows and columns, Mistral text."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.nn as nn
import numpy as np
from mlx_vlm.models import pixtral as upstream

from ._build import Rule, asks, enliven, fan_in, pixels, text_request
from ._oracle import generate_alone
from ._pictures import prompt
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

PATCH, SIDE = 4, 32
IMAGE, BREAK, END = PLAIN, PLAIN + 1, PLAIN + 2
GRIDS = ((2, 2), (2, 3), (3, 4))
Grid = tuple[int, int]


def build() -> nn.Module:
    """Four layers of 64, two vision layers of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="pixtral",
            image_token_index=IMAGE,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                hidden_size=64,
                head_dim=16,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
            ),
            vision_config=vision_config(),
        )
    )
    head = "language_model.lm_head.weight"
    enliven(model, seed=60, rules=[Rule(head, fan_in(3.0))], quiet=head)
    return model


def vision_config() -> upstream.VisionConfig:
    """Two layers of 32."""
    return upstream.VisionConfig(
        num_hidden_layers=2,
        hidden_size=32,
        head_dim=16,
        intermediate_size=64,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )


def request(seed: int, grids: Sequence[Grid], unit: int = PATCH) -> Inputs:
    """Pictures of the given grids of placeholders, each of ``unit`` pixels; smaller ones are padded at right and below."""
    high, wide = (unit * max(grid[axis] for grid in grids) for axis in (0, 1))
    padded = np.zeros((len(grids), 3, high, wide), dtype=np.float32)
    for index, (rows, columns) in enumerate(grids):
        padded[index, :, : rows * unit, : columns * unit] = pixels(
            seed + 31 * index, 3, rows * unit, columns * unit
        )
    return {
        "input_ids": prompt(seed, [_picture(*grid) for grid in grids]),
        "pixel_values": padded,
        "image_sizes": np.array(grids) * unit,
    }


def _picture(rows: int, columns: int) -> list[int]:
    """A break after each row but the last, which an end follows (``PixtralProcessor``)."""
    return [
        token
        for row in range(rows)
        for token in [*[IMAGE] * columns, BREAK if row < rows - 1 else END]
    ]


# One picture of 4, 6 or 12 placeholders. Two pictures of different grids.
image, two_images = asks(request, GRIDS, (GRIDS[1], GRIDS[2]))


FAMILY = TinyFamily(
    name="pixtral",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step; transformers agrees (tests/references).",
)
