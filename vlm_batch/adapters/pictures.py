"""Pictures to patches, as mlx-vlm's processor for grids makes them, bit for bit, in a third of its time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

#: What a call may say of a picture's size.
SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")


def with_part(processor: Any, name: str, change: Callable[[Any], Any]) -> Any:
    """A processor, or a copy of it whose part of that name is another."""
    part = getattr(processor, name, None)
    if (changed := change(part)) is part:
        return processor
    processor = copy.copy(processor)
    setattr(processor, name, changed)
    return processor


def with_quick_patches(part: Any) -> Any:
    """A processor's part for pictures, or a copy that does the same in less time.

    mlx-vlm's carries a picture from Pillow to numpy and back before it resizes it, and normalises and reorders it as a whole,
    in float32, with every time step (qwen3_vl/processing_qwen3_vl.py:351).
    """
    kind: Any = type(part)
    if not hasattr(kind, "_resolved_size") or not hasattr(kind, "_process_one") or isinstance(part, PatchesOfRows):
        return part
    part = copy.copy(part)
    part.__class__ = _quick(kind)
    return part


@cache
def _quick(kind: Any) -> Any:
    return type(kind.__name__, (PatchesOfRows, kind), {"__module__": kind.__module__})


class PatchesOfRows:
    """Goes before mlx-vlm's class: a few lines of a picture at a time, which stay in a core's cache; the same arithmetic."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    do_rescale: bool
    rescale_factor: float
    do_normalize: bool
    image_mean: list[float]
    image_std: list[float]

    def __call__(self, images: Any, **kwargs: Any) -> dict[str, Any]:
        """Patches (N, C * T * P * P) of all pictures and their grids (pictures, 3), of a list of RGB pictures of Pillow's."""
        theirs: Any = super()
        is_known = type(self.rescale_factor) is float or not self.do_rescale
        pictures = images if isinstance(images, list) else [images]
        if not is_known or not all(isinstance(one, Image.Image) and one.mode == "RGB" for one in pictures):
            return theirs.__call__(images, **kwargs)
        said = {name: kwargs[name] for name in SIZES if name in kwargs}
        sizes = [theirs._resolved_size(one.height, one.width, **said) for one in pictures]  # (height, width)
        grids = [[1, high // self.patch_size, wide // self.patch_size] for high, wide in sizes]
        counts = [high * wide for _, high, wide in grids]
        width = 3 * self.temporal_patch_size * self.patch_size**2
        patches = np.empty((sum(counts), width), dtype=np.float32)
        start = 0
        for picture, (high, wide), count in zip(pictures, sizes, counts, strict=True):
            if picture.size != (wide, high):
                picture = picture.resize((wide, high), resample=Image.Resampling.BICUBIC)
            self._fill(patches[start : start + count], np.asarray(picture))
            start += count
        return {"pixel_values": patches, "image_grid_thw": np.array(grids, dtype=np.int64)}

    def _fill(self, patches: np.ndarray, picture: np.ndarray) -> None:
        """Write a picture (H, W, 3) of bytes as patches, a row of merged ones at a time."""
        side, merged, steps = self.patch_size, self.merge_size, self.temporal_patch_size
        high, wide = picture.shape[0] // (side * merged), picture.shape[1] // (side * merged)
        shape = (high, wide, merged, merged, 3, steps, side, side)
        mean = np.array(self.image_mean, dtype=np.float32)[:, None, None]
        std = np.array(self.image_std, dtype=np.float32)[:, None, None]
        for row, filled in enumerate(patches.reshape(shape)):
            lines = picture[row * side * merged : (row + 1) * side * merged]
            values = lines.transpose(2, 0, 1).astype(np.float32, order="C")  # (3, lines, W)
            if self.do_rescale:
                values *= self.rescale_factor
            if self.do_normalize:
                values -= mean
                values /= std
            parts = values.reshape(3, merged, side, wide, merged, side).transpose(3, 1, 4, 0, 2, 5)
            for step in range(steps):
                filled[:, :, :, :, step] = parts
