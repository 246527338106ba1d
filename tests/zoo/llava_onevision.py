"""LLaVA-OneVision: SigLIP tiles packed with newlines, shrunk where there are more than nine tiles' worth; Qwen2 text."""

from __future__ import annotations

import math

import mlx.nn as nn
import numpy as np
from mlx_vlm.models import llava_onevision as upstream

from ._build import Rule, enliven, fan_in, pixels, spread, text_request
from ._oracle import generate_alone
from ._pictures import prompt
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily
from .llava_next import GRIDS, PATCH, PICTURES, SIDE, TILE, kept

IMAGE, VIDEO = PLAIN, PLAIN + 1
MOST_TILES = 2
PINPOINTS = [[TILE * rows, TILE * columns] for rows, columns in GRIDS]


def build() -> nn.Module:
    """Four layers of 64, two vision layers of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="llava_onevision",
            image_token_index=IMAGE,
            video_token_index=VIDEO,
            image_grid_pinpoints=PINPOINTS,
            # Two tiles' worth, so that the picture of four is shrunk and the others are not.
            vision_aspect_ratio=f"anyres_max_{MOST_TILES}",
            vocab_size=VOCABULARY,
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
                num_hidden_layers=2,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=2,
                image_size=TILE,
                patch_size=PATCH,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [Rule(head, fan_in(3.0)), Rule("image_newline", spread(1.0))]
    enliven(model, seed=23, rules=rules, quiet=head)
    return model


def _num_tokens(size: tuple[int, int], grid: tuple[int, int]) -> int:
    """As the processor counts (processing_llava_onevision.py, _get_unpadded_features)."""
    rows, columns = (part.stop - part.start for part in kept(size, grid))
    ratio = math.sqrt(rows * columns / (MOST_TILES * SIDE**2))
    if ratio > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return SIDE**2 + rows * (columns + 1)


def _request(seed: int, sizes: list[int], num_words: int) -> Inputs:
    pictures = [PICTURES[size] for size in sizes]
    most = max(rows * columns for _, (rows, columns) in pictures) + 1
    tiles = np.zeros((len(pictures), most, 3, TILE, TILE), dtype=np.float32)
    for index, (_, (rows, columns)) in enumerate(pictures):
        tiles[index, : rows * columns + 1] = pixels(
            seed + 31 * index, rows * columns + 1, 3, TILE, TILE
        )
    return {
        "input_ids": prompt(
            seed, [[IMAGE] * _num_tokens(*picture) for picture in pictures], num_words
        ),
        "pixel_values": tiles,
        "image_sizes": np.array([size for size, _ in pictures]),
    }


def image(seed: int, size: int) -> Inputs:
    """One picture of 2, 4 (shrunk) or 3 tiles, and 4, 5 or 6 words after it."""
    return _request(seed, [size], 4 + size)


def two_images(seed: int) -> Inputs:
    """Two pictures of different grids."""
    return _request(seed, [1, 0], 4)


def _video(seed: int, frames: int) -> tuple[list[int], np.ndarray]:
    """A video's placeholders, one for each 2 x 2 patches and one for the end of the video, and its frames."""
    return [VIDEO] * (frames * math.ceil(SIDE / 2) ** 2 + 1), pixels(
        seed + 57, 1, frames, 3, TILE, TILE
    )


def video(seed: int, size: int) -> Inputs:
    """One video of 2, 3 or 5 frames."""
    tokens, frames = _video(seed, (2, 3, 5)[size])
    return {"input_ids": prompt(seed, [tokens]), "pixel_values_videos": frames}


def picture_and_video(seed: int) -> Inputs:
    """A picture, a video, and another picture."""
    pictures = two_images(seed)
    tokens, frames = _video(seed, 3)
    first, last = ([IMAGE] * _num_tokens(*PICTURES[size]) for size in (1, 0))
    return {
        **pictures,
        "input_ids": prompt(seed, [first, tokens, last]),
        "pixel_values_videos": frames,
    }


FAMILY = TinyFamily(
    name="llava_onevision",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step; transformers agrees (tests/references).",
    video=video,
    picture_and_video=picture_and_video,
)
