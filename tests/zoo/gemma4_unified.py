"""Gemma 4 unified: patches without a tower, pictures that attend both ways."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_vlm.models import gemma4_unified as upstream

from ._build import asks, enliven, pixels
from ._pictures import prompt
from ._types import END_OF_TEXT, Inputs, TinyFamily
from .gemma4 import (
    AUDIO,
    EMBEDDING,
    END,
    FACTS,
    IMAGE,
    RULES,
    START,
    VIDEO,
    frames,
    heard,
    text_of,
    with_picture,
    with_types,
)

PATCH = 4
SAMPLES = (
    # of a recording's piece, which is one token; transformers saves another width under no name that mlx-vlm reads
    640
)
#: The last has more tokens than the window.
GRIDS = ((2, 2), (2, 3), (2, 5))


def build() -> nn.Module:
    """Four layers of 64."""
    text: dict[str, Any] = {"num_key_value_heads": 2, "num_global_key_value_heads": 1}
    model = upstream.Model(
        upstream.ModelConfig(
            image_token_id=IMAGE,
            audio_token_id=AUDIO,
            video_token_id=VIDEO,
            audio_config=upstream.AudioConfig(
                audio_embed_dim=SAMPLES, hidden_size=SAMPLES, output_proj_dims=SAMPLES
            ),
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(**text_of(**text)),
            vision_config=upstream.VisionConfig(
                model_patch_size=PATCH,
                mm_embed_dim=32,
                mm_posemb_size=16,
                output_proj_dims=32,
            ),
        )
    )
    enliven(model, seed=96, rules=RULES, quiet=EMBEDDING)
    return model


def _request(seed: int, grids: list[tuple[int, int]]) -> Inputs:
    """Pictures as lists of patches with their places, padded to the longest."""
    ids = prompt(
        seed, [[START, *[IMAGE] * (rows * columns), END] for rows, columns in grids]
    )
    most = max(rows * columns for rows, columns in grids)
    patches = np.zeros((len(grids), most, 3 * PATCH * PATCH), dtype=np.float32)
    places = np.full((len(grids), most, 2), -1, dtype=np.int32)
    for index, (rows, columns) in enumerate(grids):
        count = rows * columns
        patches[index, :count] = pixels(seed + 31 * index, count, 3 * PATCH * PATCH)
        places[index, :count] = np.stack(
            np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1
        ).reshape(-1, 2)
    return {
        "input_ids": ids,
        "pixel_values": patches,
        "image_position_ids": places,
        "mm_token_type_ids": (ids == IMAGE).astype(np.int32),
    }


# One picture of 4, 6 or 10 placeholders. Two pictures, of which the first is padded.
image, two_images = asks(_request, GRIDS, (GRIDS[1], GRIDS[2]))


def video(seed: int, size: int) -> Inputs:
    """A video of 2, 3 or 5 frames of 4, 4 or 10 placeholders, the last more than the window."""
    tokens, more = frames(seed, (2, 3, 5)[size], 1, ((2, 2), (2, 2), (2, 5))[size])
    return with_types(prompt(seed, [tokens]), flat(more))


def flat(videos: Inputs) -> Inputs:
    """All videos' frames in a row, as this family's processor has them."""
    return {
        name: value if isinstance(value, list) else value[0]
        for name, value in videos.items()
    }


def picture_and_video(seed: int) -> Inputs:
    """A picture, a video, and another picture."""
    pictures = two_images(seed)
    first, last = (
        [START, *[IMAGE] * (rows * columns), END] for rows, columns in GRIDS[1:]
    )
    tokens, more = frames(seed, 3, 1, (2, 3))
    pixels_of = {
        name: pictures[name] for name in ("pixel_values", "image_position_ids")
    }
    return with_types(prompt(seed, [first, tokens, last]), {**pixels_of, **flat(more)})


def audio(seed: int, size: int) -> Inputs:
    """One recording of 4, 6 or 11 pieces, the last more than the window."""
    count = (4, 6, 11)[size]
    return heard(seed, [count], [count], SAMPLES)


def two_audios(seed: int) -> Inputs:
    """Two recordings, of which the first is the shorter one."""
    return heard(seed, [4, 7], [4, 7], SAMPLES)


def picture_and_audio(seed: int) -> Inputs:
    """A picture, and then a recording."""
    return with_picture(image(seed, 1), audio(seed + 1, 1))


OWN = {
    "image": image,
    "two_images": two_images,
    "video": video,
    "picture_and_video": picture_and_video,
}
OWN |= {
    "audio": audio,
    "two_audios": two_audios,
    "picture_and_audio": picture_and_audio,
}
FAMILY = TinyFamily(name="gemma4_unified", build=build, **{**FACTS, **OWN})
