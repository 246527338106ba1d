"""Pictures to patches: the quicker way is mlx-vlm's, bit for bit, and reaches every family with grids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor
from PIL import Image

from vlm_batch import VLMBatcher
from vlm_batch.adapters.pictures import PatchesOfRows, with_quick_patches
from vlm_batch.assets import default_checkpoint

SIZES = [
    [(640, 480)],
    [(56, 56)],
    [(301, 199), (32, 32), (900, 40)],
    [(33, 40), (40, 33)],
]


def pictures(sizes: list[tuple[int, int]]) -> list[Image.Image]:
    random = np.random.default_rng(0)
    return [
        Image.fromarray(random.integers(0, 256, (high, wide, 3), dtype=np.uint8))
        for wide, high in sizes
    ]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"patch_size": 14, "max_pixels": 90_000},
        {
            "merge_size": 1,
            "temporal_patch_size": 1,
            "image_mean": [0.48, 0.45, 0.40],
            "image_std": [0.26, 0.26, 0.27],
        },
        {"do_rescale": False},
        {"do_normalize": False, "temporal_patch_size": 3},
        {"rescale_factor": 1 / 127.5},
    ],
    ids=str,
)
def test_the_same_bits(settings: dict[str, Any], sizes: list[tuple[int, int]]) -> None:
    theirs = Qwen3VLImageProcessor(**settings)
    ours = with_quick_patches(theirs)
    assert isinstance(ours, PatchesOfRows) and not isinstance(theirs, PatchesOfRows)
    for said in (
        {},
        {"min_pixels": 60_000, "max_pixels": 120_000},
        {"resized_height": 130, "resized_width": 70},
    ):
        right, found = theirs(pictures(sizes), **said), ours(pictures(sizes), **said)
        assert found.keys() == right.keys()
        for name, array in right.items():
            assert (
                found[name].dtype == array.dtype
                and found[name].tobytes() == array.tobytes()
            ), name


@pytest.mark.parametrize("given", ["arrays", "grey", "nested"])
def test_what_is_no_plain_list_of_pictures_goes_mlx_vlms_way(given: str) -> None:
    (image,) = pictures([(64, 48)])
    images: Any = {
        "arrays": [np.asarray(image).transpose(2, 0, 1)],
        "grey": [image.convert("L")],
        "nested": [[image], [image]],
    }[given]
    theirs = Qwen3VLImageProcessor()
    assert np.array_equal(
        with_quick_patches(theirs)(images)["pixel_values"],
        theirs(images)["pixel_values"],
    )


def test_other_parts_stay_as_they_are() -> None:
    part = object()
    assert with_quick_patches(part) is part and with_quick_patches(None) is None


def test_a_batcher_has_it() -> None:
    with VLMBatcher(default_checkpoint()) as batcher:
        assert isinstance(batcher.processing.processor.image_processor, PatchesOfRows)
