"""What the two Kimis share: the vision tower's settings, and requests."""

from __future__ import annotations

from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ._build import Rule, activated, asks, ids, pixels, spread, words
from ._deepseek import IMAGE, RULES
from ._oracle import generate_alone
from ._types import Inputs, Trace

PATCH = 4
GRIDS = ((2, 2), (2, 4), (4, 6))
VISION: dict[str, Any] = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": PATCH,
    "mlp_ratio": 2.0,
    "intermediate_size": 64,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
}
VISION_RULES = [*RULES, Rule(r"pos_emb\.weight$", spread(0.5))]


def small_table(model: Any) -> None:
    """Rotations for 16 x 16 patches at most; upstream makes those for 512 x 512 again for every picture."""
    model.vision_tower.rope_pos_emb.max_height = (
        model.vision_tower.rope_pos_emb.max_width
    ) = 16


def request(seed: int, grids: list[tuple[int, int]]) -> Inputs:
    """Words, then each picture's placeholders, one for 2 x 2 patches, followed by words."""
    parts = [words(seed, 3)]
    for index, (high, wide) in enumerate(grids):
        parts += [
            [IMAGE] * (high * wide // 4),
            words(seed + 101 * (index + 1), 4 + index),
        ]
    return {
        "input_ids": ids(*parts),
        "pixel_values": pixels(
            seed, sum(high * wide for high, wide in grids), 3, PATCH, PATCH
        ),
        "image_grid_hws": np.array(grids, dtype=np.int32),
        "image_token_id": IMAGE,
    }


# One picture of 1, 2 or 6 placeholders. Two pictures of different grids.
image, two_images = asks(request, GRIDS, (GRIDS[1], GRIDS[2]))


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's loop, with the published activation in the tower, and positions resized by the definition."""
    mlps = [block.mlp for block in model.vision_tower.blocks]
    places = f"{type(model.vision_tower).__module__}.bicubic_interpolate"
    with (
        activated(mlps, nn.GELU(approx="tanh"), "activation_fn"),
        mock.patch(places, bicubic),
    ):
        return generate_alone(model, inputs, num_tokens)


def bicubic(table: mx.array, size: tuple[int, int]) -> mx.array:
    """(1, D, H, W) -> (1, D, h, w): each place by itself, of the 4 x 4 around it, edges repeated (PyTorch's bicubic)."""
    old = np.array(table)
    new = np.zeros((*old.shape[:2], *size), dtype=np.float32)
    for row, column in np.ndindex(*size):
        centres = [
            (at + 0.5) * old.shape[2 + axis] / size[axis] - 0.5
            for axis, at in enumerate((row, column))
        ]
        for down, right in np.ndindex(4, 4):
            places = [
                int(np.floor(centre)) + tap - 1
                for centre, tap in zip(centres, (down, right), strict=True)
            ]
            weight = np.prod(
                [
                    _cubic(centre - place)
                    for centre, place in zip(centres, places, strict=True)
                ]
            )
            high, wide = (
                min(max(place, 0), limit - 1)
                for place, limit in zip(places, old.shape[2:], strict=True)
            )
            new[0, :, row, column] += weight * old[0, :, high, wide]
    return mx.array(new)


def _cubic(distance: float, a: float = -0.75) -> float:
    far = abs(distance)
    if far <= 1:
        return (a + 2) * far**3 - (a + 3) * far**2 + 1
    return a * (far**3 - 5 * far**2 + 8 * far - 4) if far < 2 else 0.0
