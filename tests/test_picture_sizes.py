"""How large the model sees a request's pictures: asked for by the request, bounded by the batcher, said in the result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlm_batch import Limits, VLMBatcher
from vlm_batch.assets import CHECKOUT, default_checkpoint, sample_images
from vlm_batch.errors import InvalidImage
from vlm_batch.inputs.processing import PixelBounds

with Image.open(sample_images()[3]) as opened:
    CIRCLE = np.asarray(opened.convert("RGB").resize((112, 112)))
DESCRIBE = "describe the image"


@pytest.fixture(scope="module")
def batcher() -> Iterator[VLMBatcher]:
    with VLMBatcher(default_checkpoint()) as made:
        yield made


def pixels(result: Any) -> int:
    assert result.error is None, result.error
    ((width, height),) = result.model_image_sizes
    return int(width * height)


def test_each_request_has_its_own_size(batcher: VLMBatcher) -> None:
    """At once, beside requests that say nothing, which are as before; the same picture at two sizes is two pictures."""
    plain = batcher.submit(CIRCLE, DESCRIBE).result(timeout=60)
    bounds: list[dict[str, Any]] = [
        {},
        {"max_pixels": 3136},
        {"min_pixels": 28000, "max_pixels": 40000},
        {"max_pixels": 6272},
    ] * 3
    results = [
        handle.result(timeout=60)
        for handle in [batcher.submit(CIRCLE, DESCRIBE, **one) for one in bounds]
    ]
    for bound, result in zip(bounds, results, strict=True):
        assert (
            bound.get("min_pixels", 1)
            <= pixels(result)
            <= bound.get("max_pixels", 12544)
        )
        assert result.image_sizes == plain.image_sizes
        if not bound:
            assert (result.text, result.model_image_sizes) == (
                plain.text,
                plain.model_image_sizes,
            )
    assert pixels(results[1]) < pixels(plain) < pixels(results[2])
    assert (
        results[1].usage.image_tokens
        < plain.usage.image_tokens
        < results[2].usage.image_tokens
    )
    assert batcher._preparer.processing.pixels == PixelBounds(3136, 12544)


def test_the_batchers_bounds() -> None:
    with VLMBatcher(default_checkpoint(), limits=Limits(max_pixels=6272)) as batcher:
        assert pixels(batcher.submit(CIRCLE, DESCRIBE).result(timeout=60)) <= 6272
        assert (
            pixels(batcher.submit(CIRCLE, DESCRIBE, max_pixels=3136).result(timeout=60))
            <= 3136
        )
        with pytest.raises(
            InvalidImage, match="max_pixels is 9,000; the batcher's is 6,272"
        ):
            batcher.submit(CIRCLE, DESCRIBE, max_pixels=9000)


def test_a_least_is_bounded_as_files_are() -> None:
    """Else a picture of a few bytes would take gigabytes: the processor makes it as large as the request says."""
    limits = Limits(image_pixels=100_000, request_pixels=250_000)
    small = np.zeros((28, 28, 3), np.uint8)
    with VLMBatcher(default_checkpoint(), limits=limits) as bounded:
        with pytest.raises(InvalidImage, match="min_pixels is 100,001; a picture may"):
            bounded.submit(small, DESCRIBE, min_pixels=100_001, max_pixels=200_000)
        with pytest.raises(InvalidImage, match="3 pictures make 300,000 pixels"):
            bounded.submit(
                [small] * 3, DESCRIBE, min_pixels=100_000, max_pixels=200_000
            )
        with pytest.raises(InvalidImage, match="5,000 pictures and frames; at most"):
            bounded.submit(["missing.png"] * 5000, DESCRIBE)


def test_a_bound_makes_no_picture_larger(batcher: VLMBatcher) -> None:
    """The model's own most is 12,544; a least above it is a wish for more."""
    large = np.asarray(Image.fromarray(CIRCLE).resize((300, 300)))
    plain = batcher.submit(large, DESCRIBE).result(timeout=60)
    bounds: list[dict[str, Any]] = [{"max_pixels": 200_000}, {"max_pixels": 12_545}]
    for bound in (*bounds, {"min_pixels": 3_136, "max_pixels": 200_000}):
        found = batcher.submit(large, DESCRIBE, **bound).result(timeout=60)
        assert (found.model_image_sizes, found.text) == (
            plain.model_image_sizes,
            plain.text,
        )
    assert (
        pixels(
            batcher.submit(
                large, DESCRIBE, min_pixels=12_600, max_pixels=200_000
            ).result(timeout=60)
        )
        > 80_000
    )
    with VLMBatcher(default_checkpoint(), limits=Limits(max_pixels=200_000)) as bounded:
        assert (
            bounded.submit(large, DESCRIBE).result(timeout=60).model_image_sizes
            == plain.model_image_sizes
        )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_pixels": 0}, "max_pixels is 0"),
        ({"min_pixels": "large"}, "min_pixels is 'large'"),
        (
            {"min_pixels": 5000, "max_pixels": 4000},
            "min_pixels is 5000, above max_pixels",
        ),
        (
            {"min_pixels": 50000},
            "min_pixels is 50,000, above max_pixels, which is 12,544",
        ),
    ],
    ids=str,
)
def test_bounds_that_are_none_are_refused(
    batcher: VLMBatcher, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidImage, match=said):
        batcher.submit(CIRCLE, DESCRIBE, **wrong)


def test_a_family_without_bounds_refuses_by_name() -> None:
    with (
        VLMBatcher(Path(CHECKOUT) / "checkpoints" / "falcon_ocr") as batcher,
        pytest.raises(InvalidImage, match="falcon_ocr's processor has no such bounds"),
    ):
        batcher.submit(CIRCLE, DESCRIBE, max_pixels=9000)
