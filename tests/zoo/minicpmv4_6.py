"""MiniCPM-V 4.6: Qwen3.5's text model; slices of packed patches, merged in the middle of the tower and after it."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_vlm.models.minicpmv4_6 import config as upstream_config
from mlx_vlm.models.minicpmv4_6 import minicpmv4_6 as upstream

from ._build import activated, enliven, ids, pixels, text_request, words
from ._oracle import generate_alone
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily, Trace
from .qwen3_5 import HEAD, RULES, TEXT, rope

PATCH = 4
START, END, IMAGE, VIDEO = PLAIN, PLAIN + 1, PLAIN + 2, PLAIN + 3
GRIDS = ((4, 4), (4, 8), (8, 8))

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": PATCH * 8,
    "patch_size": PATCH,
}
MODEL: dict[str, Any] = {
    "patch_size": PATCH,
    "insert_layer_id": 0,
    "eos_token_id": [END_OF_TEXT],
}


def build() -> nn.Module:
    """Four layers of 64: two recurrent, two with attention; two vision blocks of 32."""
    text = upstream_config.TextConfig(
        model_type="qwen3_5_text", intermediate_size=96, rope_parameters=rope(), **TEXT
    )
    vision = upstream_config.VisionConfig(**VISION)
    model = upstream.Model(
        upstream_config.ModelConfig(text_config=text, vision_config=vision, **MODEL)
    )
    assert text.vocab_size == VOCABULARY
    enliven(model, seed=46, rules=RULES, quiet=HEAD)
    return model


def request(seed: int, grid: tuple[int, int], number: int) -> Inputs:
    """Words, then each picture between its markers followed by words; patches lie side by side, (3, P, patches * P)."""
    high, wide = grid
    parts, bounds, length = [words(seed, 3)], [], 3
    for index in range(number):
        tokens = high * wide // 16
        bounds.append([length + 1, length + 1 + tokens])
        parts += [
            [START, *[IMAGE] * tokens, END],
            words(seed + 101 * (index + 1), 4 + index),
        ]
        length += tokens + 6 + index
    return {
        "input_ids": ids(*parts),
        "pixel_values": pixels(seed, 1, number, 3, PATCH, high * wide * PATCH),
        "tgt_sizes": np.array([[grid] * number], dtype=np.int32),
        "image_bound": np.array([bounds], dtype=np.int32),
    }


def image(seed: int, size: int) -> Inputs:
    """One picture of 1, 2 or 4 placeholders."""
    return request(seed, GRIDS[size], 1)


def two_images(seed: int) -> Inputs:
    """Two pictures of one grid."""
    return request(seed, GRIDS[1], 2)


def _with_frames(seed: int, slices: list[tuple[int, tuple[int, int], int]]) -> Inputs:
    """(placeholder, grid, words behind it) each: frames and pictures of one width of patches side by side."""
    parts, bounds, length = [words(seed, 3)], [], 3
    for index, (marker, (high, wide), behind) in enumerate(slices):
        tokens = high * wide // 16
        bounds.append([length + 1, length + 1 + tokens])
        parts += [
            [START, *[marker] * tokens, END],
            words(seed + 101 * (index + 1), behind),
        ]
        length += tokens + 2 + behind
    return {
        "input_ids": ids(*parts),
        "pixel_values": [
            [
                pixels(seed + 31 * i, 3, PATCH, grid[0] * grid[1] * PATCH)
                for i, (_, grid, _) in enumerate(slices)
            ]
        ],
        "tgt_sizes": np.array([[grid for _, grid, _ in slices]], dtype=np.int32),
        "image_bound": np.array([bounds], dtype=np.int32),
    }


def video(seed: int, size: int) -> Inputs:
    """A video of 2, 3 or 5 frames."""
    count = (2, 3, 5)[size]
    return _with_frames(
        seed, [(VIDEO, GRIDS[1], 4 * (index == count - 1)) for index in range(count)]
    )


def picture_and_video(seed: int) -> Inputs:
    """A picture, a video of three frames, and another picture."""
    frames = [(VIDEO, GRIDS[1], 2 * (index == 2)) for index in range(3)]
    return _with_frames(seed, [(IMAGE, GRIDS[2], 2), *frames, (IMAGE, GRIDS[0], 4)])


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's loop with the exact GELU in the merger after the tower."""
    with activated(model.merger.mlp, nn.GELU(), "act"):
        return generate_alone(model, inputs, num_tokens)


FAMILY = TinyFamily(
    name="minicpmv4_6",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step with a clean language model and the exact GELU in the merger after the tower, where "
    "mlx-vlm has its tanh form; transformers agrees (tests/references).",
    video=video,
    picture_and_video=picture_and_video,
)
