"""What the three Qwen families share: the prompt around a picture, and patches as their processors lay them out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ._build import ids, pixels, words
from ._types import PLAIN, Inputs

VISION_START, VISION_END, IMAGE, VIDEO = PLAIN, PLAIN + 1, PLAIN + 2, PLAIN + 3

PATCH, TEMPORAL_PATCH, MERGE = 4, 2, 2
PATCH_LENGTH = 3 * TEMPORAL_PATCH * PATCH * PATCH

Grid = tuple[int, int]
"""Patches (high, wide); both divisible by `MERGE`."""


def request(seed: int, grids: Sequence[Grid], start: int = VISION_START, end: int = VISION_END) -> Inputs:
    """Words, then each picture between its markers followed by words."""
    parts = [words(seed, 3)]
    for index, (high, wide) in enumerate(grids):
        placeholders = [IMAGE] * (high * wide // MERGE**2)
        parts += [[start, *placeholders, end], words(seed + 101 * (index + 1), 4 + index)]
    return {
        "input_ids": ids(*parts),
        "pixel_values": np.concatenate([pixels(seed + 31 * i, h * w, PATCH_LENGTH) for i, (h, w) in enumerate(grids)]),
        "image_grid_thw": np.array([[1, h, w] for h, w in grids], dtype=np.int32),
    }
