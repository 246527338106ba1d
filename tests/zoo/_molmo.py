"""What Molmo 2 and Molmo-Point share: their markers, their widths, and requests whose pictures are pooled from crops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._build import ids, pixels, words
from ._types import VOCABULARY, Inputs

NEW_IDS = 16
PATCH_TOKEN, COLUMN, START, END, LOW_START, LOW, FRAME, FRAME_END = (
    VOCABULARY + index for index in range(8)
)
SIDE, PATCH = 4, 4
Grid = tuple[int, int]
LOW_GRID = (2, 2)
# pooled tokens (high, wide) of the close view; a crop of it has 2 x 2
GRIDS = ((1, 2), (2, 2), (2, 4))
PAIR = (GRIDS[1], GRIDS[0])
VIT_LAYERS = [-1, -3]

#: Four text layers of 64, three vision layers of 32 of which two are read, and the pooling between them.
HEADS: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "additional_vocab_size": NEW_IDS,
    "rope_theta": 100.0,
}
VISION: dict[str, Any] = {
    **HEADS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "image_patch_size": PATCH,
    "image_num_pos": SIDE**2,
}
POOLING: dict[str, Any] = {
    **HEADS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "text_hidden_size": 64,
}


def close_view(grid: Grid) -> list[int]:
    """The ids of a picture's close view, row by row."""
    high, wide = grid
    return [START, *([PATCH_TOKEN] * wide + [COLUMN]) * high, END]


def request(
    seed: int, grids: Sequence[Grid], picture: Callable[[Grid], list[int]]
) -> Inputs:
    """Words, then each picture followed by words."""
    parts = [words(seed, 3)]
    for index, grid in enumerate(grids):
        parts += [picture(grid), words(seed + 101 * (index + 1), 4)]
    crops = [num_crops(grid) for grid in grids]
    return {
        "input_ids": ids(*parts),
        "pixel_values": pixels(seed, sum(crops), SIDE**2, 3 * PATCH**2),
        "image_token_pooling": np.concatenate([_pooling(grid) for grid in grids]),
        "image_grids": np.array([[*LOW_GRID, *grid] for grid in grids], dtype=np.int32),
        "image_num_crops": np.array(crops, dtype=np.int32),
    }


def num_crops(grid: Grid) -> int:
    """The far view, and the close view's."""
    return 1 + -(-grid[0] * grid[1] // 4)


def _pooling(grid: Grid) -> np.ndarray:
    """(tokens, 4): which patches of the picture's crops each token pools; -1 is none."""
    patches = np.arange(num_crops(grid) * SIDE**2).reshape(-1, 4)
    pooled = patches[: LOW_GRID[0] * LOW_GRID[1] + grid[0] * grid[1]].copy()
    pooled[-1, 2:] = -1
    return pooled.astype(np.int32)
