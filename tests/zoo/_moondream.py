"""What the two Moondreams share: requests, the picture's features as Moondream's own code makes them, and the prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ._build import ids, pixels, words
from ._oracle import generate_by_recomputing, to_mx
from ._types import PLAIN, Inputs, Trace

# The real sizes are 378 and 14, so 27 x 27 features; only their ratio is built into the models.
CROP, PATCH, MARGIN = 12, 4, 1
SIDE = CROP // PATCH
NUM_FEATURES = SIDE**2
BOS, ANSWER, PLACEHOLDER = PLAIN, PLAIN + 1, 0
LAYOUTS: tuple[tuple[int, int] | None, ...] = (None, (1, 2), (2, 2))

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": PATCH,
    "crop_size": CROP,
    "overlap_margin": MARGIN,
    "proj_inner_dim": 64,
    "proj_out_dim": 64,
}

ONE_PICTURE = (
    "the prompt has room for one picture's tokens (mlx_vlm/models/moondream3/moondream3.py and moondream2.py, "
    "get_input_embeddings joins BOS, features and text of one picture)"
)


def text(seed: int, length: int) -> Inputs:
    """BOS and words."""
    return {"input_ids": ids([BOS], words(seed, length - 1))}


def image(seed: int, size: int) -> Inputs:
    """A picture of 1, 3 or 5 crops (the first is the whole picture) and a question; the features are always as many."""
    layout = LAYOUTS[size]
    num_crops = 1 if layout is None else 1 + layout[0] * layout[1]
    request: dict[str, Any] = {
        "input_ids": ids(
            [BOS], [PLACEHOLDER] * NUM_FEATURES, words(seed, 4 + 3 * size), [ANSWER]
        ),
        "pixel_values": pixels(seed, num_crops, CROP, CROP, 3),
        "num_crops": [num_crops],
        "crop_layouts": [layout],
    }
    return request


def averages(grid: np.ndarray, size: int) -> np.ndarray:
    """(H, W, D) -> (size, size, D): window i runs from floor(i H / size) to ceil((i + 1) H / size), columns alike.

    The formula of torch's adaptive_avg_pool2d, which moondream/torch/vision.py calls.
    """
    high, wide, depth = grid.shape
    pooled = np.zeros((size, size, depth), dtype=grid.dtype)
    for row in range(size):
        for column in range(size):
            rows = slice(row * high // size, -(-(row + 1) * high // size))
            columns = slice(column * wide // size, -(-(column + 1) * wide // size))
            pooled[row, column] = grid[rows, columns].mean(axis=(0, 1))
    return pooled


def features(vision: nn.Module, arrays: dict) -> mx.array:
    """(1, N, D) of one picture: the whole picture's beside its crops', put together and averaged."""
    encoded = np.array(vision.encoder(arrays["pixel_values"])).reshape(
        -1, SIDE, SIDE, vision.config.hidden_size
    )
    layout, close = arrays["crop_layouts"][0], encoded[0]
    if layout is not None:
        high, wide = layout
        inner = SIDE - 2 * MARGIN
        whole = np.zeros(
            (high * inner + 2 * MARGIN, wide * inner + 2 * MARGIN, encoded.shape[-1]),
            dtype=np.float32,
        )
        for index, crop in enumerate(encoded[1:]):
            # Later crops lie over earlier ones' margins, and leave out their own; so each margin is its neighbour's.
            row, column = divmod(index, wide)
            top, left = MARGIN if row else 0, MARGIN if column else 0
            bottom = SIDE - MARGIN if row < high - 1 else SIDE
            right = SIDE - MARGIN if column < wide - 1 else SIDE
            place = whole[
                row * inner + top : row * inner + bottom,
                column * inner + left : column * inner + right,
            ]
            place[...] = crop[top:bottom, left:right]
        close = averages(whole, SIDE)
    both = np.concatenate([encoded[0], close], axis=-1).reshape(1, NUM_FEATURES, -1)
    return vision.proj_mlp(mx.array(both))


def embeddings(model: nn.Module, arrays: dict, table: nn.Module) -> mx.array:
    """(1, L, D): the prompt, with features in place of the tokens that follow BOS."""
    embedded = table(arrays["input_ids"])
    if "pixel_values" not in arrays:
        return embedded
    return mx.concatenate(
        [
            embedded[:, :1],
            features(model.vision, arrays),
            embedded[:, 1 + NUM_FEATURES :],
        ],
        axis=1,
    )


def visible(length: int, prefix: int) -> mx.array:
    """(1, 1, L, L) bool: causal, and everything within the first `prefix` positions."""
    rows, columns = mx.arange(length)[:, None], mx.arange(length)[None, :]
    return ((columns <= rows) | ((rows < prefix) & (columns < prefix)))[None, None]


def generate_under_prefix(
    model: nn.Module,
    inputs: Inputs,
    num_tokens: int,
    table: nn.Module,
    blocks: Sequence[nn.Module],
) -> Trace:
    """The whole sequence at each step over the trunk's ``blocks``, under the prefix mask when there is a picture."""
    arrays = to_mx(inputs)
    prompt = embeddings(model, arrays, table)
    prefix = 1 + NUM_FEATURES if "pixel_values" in arrays else 0

    def logits(generated: list[int]) -> mx.array:
        hidden = mx.concatenate(
            [prompt, table(mx.array([generated], dtype=mx.int32))], axis=1
        )
        mask = visible(hidden.shape[1], prefix)
        for block in blocks:
            hidden = block(hidden, mask)
        return model.text.lm_head(model.text.model.post_ln(hidden[:, -1]))[0]

    return generate_by_recomputing(logits, num_tokens)
