"""Moondream's crops as published (moondream/torch/image_crops.py); mlx-vlm's differ (moondream3/image_crops.py:13, :58)."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from mlx_vlm.models.moondream3.processing_moondream3 import Moondream3Processor
from PIL import Image

PATCH = 14


def with_published_crops(processor: Any) -> Any:
    if not isinstance(processor, Moondream3Processor):
        return processor
    processor = copy.copy(processor)
    processor.__class__ = PublishedCrops
    return processor


class PublishedCrops(Moondream3Processor):
    """Makes ``pixel_values`` (crops, side, side, 3): a picture, then its crops."""

    def __call__(
        self, text: Any = None, images: Any = None, **options: Any
    ) -> dict[str, Any]:
        pictures: Sequence[Image.Image] = (
            images if isinstance(images, list) else [] if images is None else [images]
        )
        stand_ins = [Image.new("RGB", (1, 1)) for _ in pictures]
        found: dict[str, Any] = super().__call__(text, stand_ins or None, **options)
        if pictures:
            cut = [
                overlapping_crops(
                    picture, self.crop_size, self.max_crops, self.overlap_margin
                )
                for picture in pictures
            ]
            found["pixel_values"] = np.concatenate([crops for crops, _ in cut])
            found["num_crops"] = [len(crops) for crops, _ in cut]
            found["crop_layouts"] = [grid for _, grid in cut]
        return found


def overlapping_crops(
    picture: Image.Image, side: int, most: int, margin: int
) -> tuple[np.ndarray, tuple[int, int]]:
    """Return a picture and its crops, (1 + rows * columns, side, side, 3) float32 in [-1, 1], and (rows, columns).

    Args:
        picture: Resized by Pillow's Lanczos, as published without pyvips.
        side: Pixels of a crop's side.
        most: Most crops.
        margin: Neighbours' shared patches.
    """
    border = margin * PATCH
    window = side // PATCH * PATCH - 2 * border
    rows, columns = crop_grid(
        picture.height - 2 * border, picture.width - 2 * border, window, most
    )
    picture = picture.convert("RGB")
    large = picture.resize(
        (columns * window + 2 * border, rows * window + 2 * border),
        Image.Resampling.LANCZOS,
    )
    corners = [
        (column * window, row * window)
        for row in range(rows)
        for column in range(columns)
    ]
    parts = [picture.resize((side, side), Image.Resampling.LANCZOS)]
    parts += [large.crop((left, top, left + side, top + side)) for left, top in corners]
    return np.stack(
        [np.asarray(part, dtype=np.float32) for part in parts]
    ) / 127.5 - 1, (rows, columns)


def crop_grid(height: int, width: int, window: int, most: int) -> tuple[int, int]:
    """Return (rows, columns) of at most ``most`` windows in the picture's shape."""
    if min(height, width) <= window:
        return 1, 1
    rows, columns = math.ceil(height / window), math.ceil(width / window)
    if rows * columns > most:
        shrink = math.sqrt(most / (rows * columns))
        return max(1, math.floor(rows * shrink)), max(1, math.floor(columns * shrink))
    rows = max(rows, math.floor(math.sqrt(most * height / width)))
    columns = max(columns, math.floor(math.sqrt(most * width / height)))
    if rows * columns > most:
        rows, columns = (
            (rows, most // rows) if columns > rows else (most // columns, columns)
        )
    return max(1, rows), max(1, columns)
