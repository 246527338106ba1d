"""Moondream's crops are those of its own code (moondream/torch/image_crops.py at 44146f13, which these were compared with)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mlx_vlm.models.moondream3.processing_moondream3 import Moondream3Processor
from PIL import Image

from vlm_batch.models._moondream2 import (
    crop_grid,
    overlapping_crops,
    with_published_crops,
)
from vlm_batch.models.moondream2 import Moondream2
from vlm_batch.models.moondream3 import Moondream3

SIDE, MOST, MARGIN, PATCH = 378, 12, 4, 14
BORDER, WINDOW = MARGIN * PATCH, SIDE - 2 * MARGIN * PATCH

#: (width, height) of a picture -> (rows, columns), as ``select_tiling`` answers for what its margins leave.
GRIDS = {
    (50, 40): (1, 1),
    (378, 378): (1, 1),
    (640, 480): (2, 4),
    (1000, 300): (1, 1),
    (300, 1200): (1, 1),
    (1200, 900): (2, 4),
    (2000, 1500): (3, 4),
}


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(
        np.random.RandomState(3).randint(0, 256, (height, width, 3), dtype=np.uint8)
    )


@pytest.mark.parametrize(("size", "grid"), GRIDS.items())
def test_grids_are_the_published_ones(
    size: tuple[int, int], grid: tuple[int, int]
) -> None:
    width, height = size
    assert crop_grid(height - 2 * BORDER, width - 2 * BORDER, WINDOW, MOST) == grid


def test_more_than_there_may_be_shrink_together() -> None:
    assert crop_grid(4000, 4000, WINDOW, MOST) == (3, 3)
    assert crop_grid(4000, 800, WINDOW, MOST) == (6, 1)


def test_crops_lie_in_the_resized_picture_and_share_their_margins() -> None:
    picture = noise(640, 480)
    crops, (rows, columns) = overlapping_crops(picture, SIDE, MOST, MARGIN)
    assert crops.shape == (1 + rows * columns, SIDE, SIDE, 3)
    assert crops.dtype == np.float32
    whole = np.empty(
        (rows * WINDOW + 2 * BORDER, columns * WINDOW + 2 * BORDER, 3), dtype=np.float32
    )
    for index, crop in enumerate(crops[1:]):
        top, left = index // columns * WINDOW, index % columns * WINDOW
        whole[top : top + SIDE, left : left + SIDE] = crop
    right = picture.resize((whole.shape[1], whole.shape[0]), Image.Resampling.LANCZOS)
    np.testing.assert_allclose(
        whole, (np.asarray(right, dtype=np.float32) / 255 - 0.5) / 0.5, atol=1e-6
    )
    np.testing.assert_array_equal(crops[1][:, -2 * BORDER :], crops[2][:, : 2 * BORDER])


@pytest.mark.parametrize("family", [Moondream2, Moondream3])
def test_the_processor_of_a_checkpoint_cuts_so(family: Any) -> None:
    """Through the adapter's hook; ids and everything else stay as mlx-vlm's processor makes them."""
    tokenizer = SimpleNamespace(
        eos_token="e",
        bos_token="b",
        pad_token="p",
        bos_token_id=0,
        pad_token_id=0,
        encode=lambda text, **_: [7, 8],
    )
    theirs = Moondream3Processor(tokenizer)
    ours = family.processor(theirs)
    assert type(theirs) is Moondream3Processor  # the caller's is left alone
    found = ours(text="why?", images=[noise(640, 480)])
    before = theirs(text="why?", images=[noise(640, 480)])
    assert (found["num_crops"], found["crop_layouts"]) == ([9], [(2, 4)])
    assert found["pixel_values"].shape == (9, SIDE, SIDE, 3)
    np.testing.assert_array_equal(found["input_ids"], before["input_ids"])
    assert "pixel_values" not in ours(text="why?")


def test_other_processors_are_left_alone() -> None:
    processor = SimpleNamespace()
    assert with_published_crops(processor) is processor
