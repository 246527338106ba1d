"""Pictures to patches, bit for bit like mlx-vlm's, but faster."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image

from vlm_batch.arrays import Deferred
from vlm_batch.inputs.recalled import RecalledPicture, StandIn
from vlm_batch.store.digest import HASHES, digest, hash_ahead
from vlm_batch.store.pictures import PictureStore

#: Options of a call that set a picture's size.
SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")


def with_part(processor: Any, name: str, change: Callable[[Any], Any]) -> Any:
    """Change a part of the processor, if it has it, in a copy."""
    part = getattr(processor, name, None)
    if part is None or (changed := change(part)) is part:
        return processor
    processor = copy.copy(processor)
    setattr(processor, name, changed)
    return processor


def with_mixin(part: Any, front: type) -> Any:
    """Return a copy with ``front`` before its class, unless it is there."""
    kind: Any = type(part)
    if issubclass(kind, front):
        return part
    part = copy.copy(part)
    part.__class__ = type(kind.__name__, (front, kind), {"__module__": kind.__module__})
    return part


def with_quick_patches(part: Any) -> Any:
    """Return a processor's picture part, or a faster copy.

    mlx-vlm's converts to numpy and back, and normalises pictures whole (qwen3_vl/processing_qwen3_vl.py:351).
    """
    kind: Any = type(part)
    if hasattr(kind, "_resolved_size") and hasattr(kind, "_process_one"):
        return with_mixin(part, PatchesOfRows)
    return part


class PatchesOfRows:
    """Mixin that makes patches line by line, within a core's cache.

    With a store, ``pictures``, patches of repeated pictures are made when read.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    do_rescale: bool
    rescale_factor: float
    do_normalize: bool
    image_mean: list[float]
    image_std: list[float]
    pictures: PictureStore | None = None

    def __call__(self, images: Any, **kwargs: Any) -> dict[str, Any]:
        """Return patches (N, C * T * P * P) and grids (pictures, 3) of RGB pictures."""
        theirs: Any = super()
        pictures = images if isinstance(images, list) else [images]
        is_known = type(self.rescale_factor) is float or not self.do_rescale
        if not is_known or not all(map(_is_rgb, pictures)):
            return theirs.__call__(images, **kwargs)
        said = {name: kwargs[name] for name in SIZES if name in kwargs}
        sizes: list[tuple[int, int]] = []  # (height, width)
        for one in pictures:
            sizes.append(theirs._resolved_size(one.height, one.width, **said))
        sides = np.array(sizes, dtype=np.int64).reshape(-1, 2) // self.patch_size
        grids = np.insert(sides, 0, 1, axis=1)
        store = self.pictures
        if store is not None and all(map(_has_content, pictures)):
            recalled = map(partial(self._recalled, store), pictures, sizes)
            stand_in = StandIn(list(recalled))
            pictures[0].stand_in = stand_in
            return {"pixel_values": stand_in, "image_grid_thw": grids}
        made = [
            self._patches(resized(picture, size))
            for picture, size in zip(pictures, sizes, strict=True)
        ]
        return {"pixel_values": np.concatenate(made), "image_grid_thw": grids}

    def _recalled(
        self, store: PictureStore, picture: RecalledPicture, size: tuple[int, int]
    ) -> mx.array | Patches:
        settings = (self.patch_size, self.merge_size, self.temporal_patch_size)
        table = self._normalised(
            np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
        )[:, 0].T.copy()
        key = digest(["patches", picture.content, size, settings, table])
        kept: Patches | None = store.get(key)
        if kept is not None:
            return kept
        seen = resized(picture, size)
        made = mx.array(self._patches(seen))
        hash_ahead(made)
        store.put(
            key, Patches(mx.array(seen), mx.array(table), settings, HASHES.of(made))
        )
        return made

    # (lines, W, 3) -> (3, lines, W)
    def _normalised(self, lines: np.ndarray) -> np.ndarray:
        values = lines.transpose(2, 0, 1).astype(np.float32, order="C")
        if self.do_rescale:
            values *= self.rescale_factor
        if self.do_normalize:
            values -= np.array(self.image_mean, dtype=np.float32)[:, None, None]
            values /= np.array(self.image_std, dtype=np.float32)[:, None, None]
        return values

    # (H, W, 3) -> (N, 3 * T * P * P)
    def _patches(self, picture: np.ndarray) -> np.ndarray:
        side, merged, steps = self.patch_size, self.merge_size, self.temporal_patch_size
        lines = side * merged
        high, wide = picture.shape[0] // lines, picture.shape[1] // lines
        shape = (high, wide, merged, merged, 3, steps, side, side)
        patches = np.empty(shape, dtype=np.float32)
        for row, filled in enumerate(patches):
            values = self._normalised(picture[row * lines : (row + 1) * lines])
            parts = values.reshape(3, merged, side, wide, merged, side)
            # the same in each step of time
            filled[...] = parts.transpose(3, 1, 4, 0, 2, 5)[:, :, :, :, None]
        return patches.reshape(-1, 3 * steps * side * side)


def _is_rgb(picture: Any) -> bool:
    return isinstance(picture, Image.Image) and picture.mode == "RGB"


def _has_content(picture: Any) -> bool:
    """Whether a picture may be known from before."""
    return isinstance(picture, RecalledPicture) and bool(picture.content)


# (height, width, 3) bytes
def resized(picture: Image.Image, size: tuple[int, int]) -> np.ndarray:
    high, wide = size
    if picture.size != (wide, high):
        picture = picture.resize((wide, high), resample=Image.Resampling.BICUBIC)
    return np.asarray(picture)


class Patches(Deferred):
    """Patches stored as a picture's bytes (H, W, 3) and a value table; ``known`` is their BLAKE3."""

    def __init__(
        self,
        picture: mx.array,
        table: mx.array,
        settings: tuple[int, int, int],
        known: bytes | None,
    ) -> None:
        self._picture = picture
        self._table = table
        self._settings = settings
        self._known = known
        side, _, steps = settings
        self.shape = (picture.size // (3 * side * side), 3 * steps * side * side)
        self.nbytes = picture.nbytes + table.nbytes

    def array(self) -> mx.array:
        side, merged, steps = self._settings
        high, wide = (length // (side * merged) for length in self._picture.shape[:2])
        values = mx.take(
            self._table.reshape(-1),
            self._picture.astype(mx.uint32) * 3 + mx.arange(3, dtype=mx.uint32),
        )
        parts = values.reshape(high, merged, side, wide, merged, side, 3).transpose(
            0, 3, 1, 4, 6, 2, 5
        )
        several = mx.broadcast_to(
            parts[:, :, :, :, :, None], (*parts.shape[:5], steps, side, side)
        )
        made = several.reshape(self.shape)
        if self._known is not None:
            HASHES.note(made, self._known)
        return made
