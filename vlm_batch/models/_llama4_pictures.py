"""Llama 4's tiles as published; mlx-vlm's are distorted (llama4/processing_llama4.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from mlx_vlm.models.llama4.processing_llama4 import Llama4ImageProcessor
from PIL import Image


class TileProcessor(Llama4ImageProcessor):
    """Pads pictures with black to the canvas that shrinks them least, then cuts tiles.

    As transformers (image_processing_llama4.py) with ``resize_to_max_canvas`` off.
    """

    def preprocess(self, images: Any, **options: Any) -> dict[str, Any]:
        """Return ``pixel_values`` (tiles, 3, side, side) and grids (rows, columns)."""
        tiles, grids = [], []
        for image in images if isinstance(images, list) else [images]:
            picture = (
                image
                if isinstance(image, Image.Image)
                else Image.fromarray(np.uint8(image))
            )
            picture = picture.convert("RGB")
            grid = best_grid(
                (picture.height, picture.width), self.size, self.max_patches
            )
            tiles += [
                self._preprocess_single(tile) for tile in self._tiles(picture, grid)
            ]
            grids.append(grid)
        return {"pixel_values": np.stack(tiles), "aspect_ratios": grids}

    def _tiles(
        self, picture: Image.Image, grid: tuple[int, int]
    ) -> Iterator[Image.Image]:
        rows, columns = grid
        side = self.size
        canvas = Image.new("RGB", (columns * side, rows * side))
        canvas.paste(
            picture.resize(
                fitted(picture.size, canvas.size, side), Image.Resampling.BILINEAR
            )
        )
        for row in range(rows):
            for column in range(columns):
                yield canvas.crop(
                    (column * side, row * side, (column + 1) * side, (row + 1) * side)
                )
        if rows * columns > 1:
            yield picture.resize((side, side), Image.Resampling.BILINEAR)


def best_grid(size: tuple[int, int], side: int, max_tiles: int) -> tuple[int, int]:
    """Return the grid (rows, columns) that stretches (height, width) pixels least, else shrinks them least.

    Ties go to the fewest tiles.
    """
    high, wide = size
    grids = [
        (rows, count // rows)
        for count in range(1, max_tiles + 1)
        for rows in range(1, count + 1)
        if count % rows == 0
    ]
    scales = {
        grid: np.float32(min(grid[0] * side / high, grid[1] * side / wide))
        for grid in grids
    }
    stretching = [scale for scale in scales.values() if scale >= 1]
    chosen = min(stretching) if stretching else max(scales.values())
    return next(grid for grid in grids if scales[grid] == chosen)


def fitted(
    size: tuple[int, int], canvas: tuple[int, int], side: int
) -> tuple[int, int]:
    """Return undistorted (width, height) within a canvas."""
    wide, high = (
        min(max(own, side), room) for own, room in zip(size, canvas, strict=True)
    )
    if wide / size[0] < high / size[1]:
        return wide, max(1, min(math.floor(size[1] * (wide / size[0])), high))
    return max(1, min(math.floor(size[0] * (high / size[1])), wide)), high
