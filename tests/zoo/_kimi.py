"""What the two Kimis share: the vision tower's settings, and requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._build import Rule, ids, pixels, spread, words
from ._deepseek import IMAGE, RULES
from ._types import Inputs

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
    model.vision_tower.rope_pos_emb.max_height = model.vision_tower.rope_pos_emb.max_width = 16


def request(seed: int, grids: list[tuple[int, int]]) -> Inputs:
    """Words, then each picture's placeholders, one for 2 x 2 patches, followed by words."""
    parts = [words(seed, 3)]
    for index, (high, wide) in enumerate(grids):
        parts += [[IMAGE] * (high * wide // 4), words(seed + 101 * (index + 1), 4 + index)]
    return {
        "input_ids": ids(*parts),
        "pixel_values": pixels(seed, sum(high * wide for high, wide in grids), 3, PATCH, PATCH),
        "image_grid_hws": np.array(grids, dtype=np.int32),
        "image_token_id": IMAGE,
    }


def image(seed: int, size: int) -> Inputs:
    """One picture of 1, 2 or 6 placeholders."""
    return request(seed, [GRIDS[size]])


def two_images(seed: int) -> Inputs:
    """Two pictures of different grids."""
    return request(seed, [GRIDS[1], GRIDS[2]])
