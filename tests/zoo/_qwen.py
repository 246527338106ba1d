"""What Qwen's families and those like them share: the prompt around a picture, and patches as their processors lay them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ._build import asks, ids, pixels, words
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs

VISION_START, VISION_END, IMAGE, VIDEO = PLAIN, PLAIN + 1, PLAIN + 2, PLAIN + 3

PATCH, TEMPORAL_PATCH, MERGE = 4, 2, 2
PATCH_LENGTH = 3 * TEMPORAL_PATCH * PATCH * PATCH

MROPE: dict[str, Any] = {"type": "mrope", "mrope_section": [2, 3, 3]}
"""Of the eight frequencies of a head of 16: time, rows, columns (Qwen2-VL and Qwen2.5-VL)."""

MARKERS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "eos_token_id": [END_OF_TEXT],
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
}
"""Settings of these families' models. Below: of their towers' patches, and of Qwen3-VL's text and tower."""
PATCHES: dict[str, Any] = {
    "patch_size": PATCH,
    "spatial_patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": TEMPORAL_PATCH,
}
QWEN3_TEXT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "rope_theta": 100.0,
    "max_position_embeddings": 1024,
    "rope_scaling": {"type": "default", "mrope_section": [4, 2, 2]},
}
QWEN3_VISION: dict[str, Any] = {
    **PATCHES,
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_heads": 2,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 1],
}

Grid = tuple[int, int]
"""Patches (high, wide); both divisible by `MERGE`."""


def request(
    seed: int, grids: Sequence[Grid], start: int = VISION_START, end: int = VISION_END
) -> Inputs:
    """Words, then each picture between its markers followed by words."""
    parts = [words(seed, 3)]
    for index, (high, wide) in enumerate(grids):
        placeholders = [IMAGE] * (high * wide // MERGE**2)
        parts += [
            [start, *placeholders, end],
            words(seed + 101 * (index + 1), 4 + index),
        ]
    return {
        "input_ids": ids(*parts),
        "pixel_values": np.concatenate(
            [
                pixels(seed + 31 * i, h * w, PATCH_LENGTH)
                for i, (h, w) in enumerate(grids)
            ]
        ),
        "image_grid_thw": np.array([[1, h, w] for h, w in grids], dtype=np.int32),
    }


def still_request(seed: int, grids: Sequence[Grid]) -> Inputs:
    """The same, where a patch is one moment."""
    flat = [
        pixels(seed + 31 * i, high * wide, 3 * PATCH**2)
        for i, (high, wide) in enumerate(grids)
    ]
    return {**request(seed, grids), "pixel_values": np.concatenate(flat)}


GRIDS = ((4, 4), (4, 6), (6, 8))
PAIR = ((4, 6), (4, 4))


# One picture of 4, 6 or 12 placeholders; two of different grids.
image, two_images = asks(request, GRIDS, PAIR)


Steps = tuple[int, int, int]
"""A video's (time steps, high, wide), in patches."""

VIDEOS: tuple[Steps, ...] = ((2, 4, 4), (3, 4, 10), (7, 4, 4))
SECONDS = (0.5, 1.2, 1.7)
"""Between two time steps; Qwen2.5-VL's positions make 1, 2.4 and 3.4 of them."""


def video_tokens(steps: Steps, timestamped: bool) -> list[int]:
    """A video's markers and placeholders; its time steps apart, each after two words that stand for its seconds."""
    time, high, wide = steps
    step = [VIDEO] * (high * wide // MERGE**2)
    if not timestamped:
        return [VISION_START, *step * time, VISION_END]
    return [
        token
        for index in range(time)
        for token in (11 + index, 7, VISION_START, *step, VISION_END)
    ]


def video_pixels(seed: int, steps: Steps) -> np.ndarray:
    return pixels(seed + 57, steps[0] * steps[1] * steps[2], PATCH_LENGTH)


def video_request(
    seed: int, size: int, *, timestamped: bool = False, **more: Any
) -> Inputs:
    """Words, a video, words."""
    steps = VIDEOS[size]
    return {
        "input_ids": ids(
            words(seed, 3), video_tokens(steps, timestamped), words(seed + 101, 4)
        ),
        "pixel_values_videos": video_pixels(seed, steps),
        "video_grid_thw": np.array([steps], dtype=np.int32),
        **more,
    }


def timed_video_request(seed: int, size: int) -> Inputs:
    """A video whose positions go by its seconds."""
    return video_request(
        seed, size, second_per_grid_ts=np.array([SECONDS[size]], dtype=np.float32)
    )


def stamped_video_request(seed: int, size: int) -> Inputs:
    """A video whose seconds stand in the prompt."""
    return video_request(seed, size, timestamped=True)


def picture_and_video(seed: int, *, timestamped: bool = False, **more: Any) -> Inputs:
    """A picture, a video, and another picture, with words around each."""
    grids, steps = [(4, 6), (4, 4)], VIDEOS[1]
    first, last = (
        [VISION_START, *[IMAGE] * (high * wide // MERGE**2), VISION_END]
        for high, wide in grids
    )
    parts = [
        words(seed, 2),
        first,
        words(seed + 1, 2),
        video_tokens(steps, timestamped),
        words(seed + 2, 3),
        last,
    ]
    return {
        "input_ids": ids(*parts, words(seed + 3, 3)),
        "pixel_values": np.concatenate(
            [
                pixels(seed + 31 * i, h * w, PATCH_LENGTH)
                for i, (h, w) in enumerate(grids)
            ]
        ),
        "image_grid_thw": np.array([[1, h, w] for h, w in grids], dtype=np.int32),
        "pixel_values_videos": video_pixels(seed, steps),
        "video_grid_thw": np.array([steps], dtype=np.int32),
        **more,
    }


def timed_picture_and_video(seed: int) -> Inputs:
    return picture_and_video(
        seed, second_per_grid_ts=np.array([SECONDS[1]], dtype=np.float32)
    )


def stamped_picture_and_video(seed: int) -> Inputs:
    return picture_and_video(seed, timestamped=True)
