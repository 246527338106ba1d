"""Command A Vision's image processor with Pillow, not torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer
from transformers.image_utils import SizeDict
from transformers.models.cohere2_vision.processing_cohere2_vision import (
    Cohere2VisionProcessor,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
)


class TileProcessor(GotOcr2ImageProcessorPil):
    """GOT-OCR's processor with another grid, and defaults of ``Cohere2VisionImageProcessor``."""

    size = {"height": 512, "width": 512}
    crop_to_patches = True
    patch_size = 16

    def crop_image_to_patches(
        self,
        image: np.ndarray,
        min_patches: int,
        max_patches: int,
        use_thumbnail: bool = True,
        patch_size: SizeDict | None = None,
        resample: Any = None,
    ) -> list[np.ndarray]:
        """(3, H, W) -> tiles (3, side, side) by rows, then the whole picture if several."""
        assert patch_size is not None
        high, wide = int(patch_size.height or 0), int(patch_size.width or 0)
        columns, rows = best_grid((image.shape[1], image.shape[2]), high, max_patches)
        resized = self.resize(
            image, SizeDict(height=rows * high, width=columns * wide), resample=resample
        )
        tiles = [
            resized[
                :, row * high : (row + 1) * high, column * wide : (column + 1) * wide
            ]
            for row in range(rows)
            for column in range(columns)
        ]
        whole = (
            [self.resize(image, patch_size, resample=resample)]
            if use_thumbnail and len(tiles) > 1
            else []
        )
        return [*tiles, *whole]


def best_grid(size: tuple[int, int], side: int, max_tiles: int) -> tuple[int, int]:
    """Return the grid (columns, rows) that stretches (height, width) pixels least, else shrinks them least.

    Ties go to the fewest tiles, then columns.
    """
    high, wide = size
    counts = range(1, max_tiles + 1)
    grids = sorted(
        (
            (columns, rows)
            for columns in counts
            for rows in counts
            if columns * rows <= max_tiles
        ),
        key=lambda grid: grid[0] * grid[1],
    )
    scales = [min(columns * side / wide, rows * side / high) for columns, rows in grids]
    stretching = [scale for scale in scales if scale >= 1]
    return grids[scales.index(min(stretching) if stretching else max(scales))]


def from_pretrained(path: str | Path, **options: Any) -> Cohere2VisionProcessor:
    from mlx_vlm.models.base import load_chat_template

    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    load_chat_template(tokenizer, path)
    pictures = TileProcessor.from_pretrained(path, **options)
    return Cohere2VisionProcessor(
        pictures, tokenizer, chat_template=tokenizer.chat_template
    )
