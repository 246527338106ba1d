"""Pictures to patches, as mlx-vlm's processor of the Qwen families makes them, bit for bit, in a fraction of its time.

That one carries a picture from Pillow to numpy and back before it is resized, and normalises and reorders it as a whole, in
float32, twice over for the two time steps. Here bytes are reordered, a few rows at a time, so that they stay in a core's cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor
from PIL import Image


class PatchesOfRows(Qwen3VLImageProcessor):
    """mlx-vlm's processor (qwen3_vl/processing_qwen3_vl.py:351), with the same arithmetic on each value."""

    def __call__(self, images: Any, **kwargs: Any) -> dict[str, Any]:
        """Patches (N, C * T * P * P) of all pictures and their grids (pictures, 3), of a list of RGB pictures of Pillow's."""
        is_known = type(self.rescale_factor) is float or not self.do_rescale
        pictures = images if isinstance(images, list) else [images]
        if not is_known or not all(isinstance(one, Image.Image) and one.mode == "RGB" for one in pictures):
            return super().__call__(images, **kwargs)
        sizes = [self._resolved_size(one.height, one.width, **kwargs) for one in pictures]  # (height, width)
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
