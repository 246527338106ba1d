"""MiniCPM-V 4.7: as 4.6 with experts, and positions on a canvas that a picture's thumbnail and slices share."""

from __future__ import annotations

import mlx.nn as nn
import numpy as np
from mlx_vlm.models.minicpmv4_6.config import VisionConfig
from mlx_vlm.models.minicpmv4_7 import config as upstream_config
from mlx_vlm.models.minicpmv4_7 import minicpmv4_7 as upstream
from mlx_vlm.models.qwen3_5_moe.config import TextConfig

from . import minicpmv4_6 as before
from ._build import enliven, ids, pixels, text_request, words
from ._types import PLAIN, Inputs, TinyFamily
from .qwen3_5 import HEAD, RULES, TEXT, rope

SLICE_START, SLICE_END, NEWLINE, VIDEO = PLAIN + 3, PLAIN + 4, PLAIN + 5, PLAIN + 6


def build() -> nn.Module:
    """Four layers of 64 with experts: two recurrent, two with attention; two vision blocks of 32."""
    text = TextConfig(
        model_type="qwen3_5_moe_text",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
        rope_parameters=rope(),
        **TEXT,
    )
    model = upstream.Model(
        upstream_config.ModelConfig(
            text_config=text,
            vision_config=VisionConfig(**before.VISION),
            image_token_id=before.IMAGE,
            video_token_id=VIDEO,
            image_start_id=before.START,
            image_end_id=before.END,
            slice_start_id=SLICE_START,
            slice_end_id=SLICE_END,
            newline_id=NEWLINE,
            **before.MODEL,
        )
    )
    enliven(model, seed=50, rules=RULES, quiet=HEAD)
    return model


def request(seed: int, grid: tuple[int, int], number: int) -> Inputs:
    """As 4.6; the places of the slices are found in the ids."""
    found = before.request(seed, grid, number)
    del found["image_bound"]
    return found


def image(seed: int, size: int) -> Inputs:
    """One picture of 1, 2 or 4 placeholders, in one piece."""
    return request(seed, before.GRIDS[size], 1)


def two_images(seed: int) -> Inputs:
    """Two pictures of one grid."""
    return request(seed, before.GRIDS[1], 2)


def _placed(found: Inputs) -> Inputs:
    """4.6's request, with this family's placeholder for videos; the places of the slices are found in the ids."""
    del found["image_bound"]
    tokens = found["input_ids"]
    return {
        **found,
        "input_ids": np.where(tokens == before.VIDEO, VIDEO, tokens).astype(np.int32),
    }


def video(seed: int, size: int) -> Inputs:
    """A video of 2, 3 or 5 frames."""
    return _placed(before.video(seed, size))


def picture_and_video(seed: int) -> Inputs:
    """A picture, a video of three frames, and another picture."""
    return _placed(before.picture_and_video(seed))


def sliced(seed: int) -> Inputs:
    """A thumbnail and two slices side by side, on one canvas."""
    grid = before.GRIDS[1]
    placeholders = [before.IMAGE] * (grid[0] * grid[1] // 16)
    thumbnail = [before.START, *placeholders, before.END]
    slices = [SLICE_START, *placeholders, SLICE_END] * 2
    return {
        "input_ids": ids(words(seed, 3), thumbnail, slices, words(seed + 101, 5)),
        "pixel_values": pixels(
            seed, 1, 3, 3, before.PATCH, grid[0] * grid[1] * before.PATCH
        ),
        "tgt_sizes": np.array([[grid] * 3], dtype=np.int32),
    }


FAMILY = TinyFamily(
    name="minicpmv4_7",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    also={"sliced": sliced},
    video=video,
    picture_and_video=picture_and_video,
    greedy=before.greedy,
    oracle_note="As minicpmv4_6; transformers agrees (tests/references).",
)
