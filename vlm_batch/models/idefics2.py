"""Idefics 2: pictures in their own shapes, and a perceiver that makes the same number of latents of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.placeholders import PlacingAdapter
from vlm_batch.models.idefics3 import Idefics3
from vlm_batch.registry import ModelSpec, register


class TanhGELU(nn.GELU):
    """GELU by its tanh form, whatever approximation it was made with."""

    def __call__(self, x: mx.array) -> mx.array:
        return nn.gelu_approx(x)


@register(
    ModelSpec(
        family="idefics2",
        model_types=("idefics2",),
        notes=(
            "a patch's position is its place in the picture, as in transformers (modeling_idefics2.py, "
            "Idefics2VisionEmbeddings); mlx-vlm's boundaries are unevenly spaced and begin at minus one "
            "(idefics2/vision.py:131)",
            "the tower's GELU has the tanh form that the configuration names; mlx-vlm takes the sigmoid's "
            "(idefics2/vision.py:8)",
            "a picture is encoded without the padding that a larger one beside it brings; mlx-vlm lets patches and latents "
            "attend to it (idefics2/vision.py:195, idefics2.py:66)",
        ),
    )
)
class Idefics2(PlacingAdapter, Idefics3):
    """Pictures keep their own shape; a perceiver makes the same number of latents of each."""

    input_keys = frozenset({"pixel_values", "pixel_attention_mask"})

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.idefics2.vision import VisionEmbeddings

        class EvenPositions(VisionEmbeddings):
            """Upstream sorts patches between boundaries that do not fit (idefics2/vision.py:131-157); here as in
            transformers (modeling_idefics2.py, Idefics2VisionEmbeddings). Pictures come without padding."""

            def __call__(self, x: mx.array, mask: Any = None) -> mx.array:
                """(1, H, W, 3) -> (1, patches, D)"""
                patches = self.patch_embedding(x)  # (1, rows, columns, D)
                rows, columns = (buckets(count, self.num_patches) for count in patches.shape[1:3])
                places = mx.array((rows[:, None] * self.num_patches + columns).reshape(-1))
                return patches.flatten(1, 2) + self.position_embedding(places)

        return {VisionEmbeddings: EvenPositions, nn.GELU: TanhGELU}

    embeddings = "embed_tokens"

    def encode_pictures(self, extra: Mapping[str, Any], dtype: mx.Dtype) -> list[mx.array]:
        """The latents of each picture, one at a time; what is zero throughout is no picture."""
        pictures = extra["pixel_values"].flatten(0, 1)  # (N, 3, H, W)
        masks = extra.get("pixel_attention_mask")
        masks = mx.ones((len(pictures), *pictures.shape[2:])) if masks is None else masks.flatten(0, 1)
        return [self._encode(*one) for one in zip(pictures, masks, strict=True) if mx.any(one[0] != 0).item()]

    def _encode(self, picture: mx.array, mask: mx.array) -> mx.array:
        """(3, H, W) and which pixels are its own (H, W) -> (latents, D)"""
        patch = self.config.vision_config.patch_size
        own = np.array(mask) != 0
        high, wide = (
            min(-(-int(own.any(axis=axis).sum()) // patch), own.shape[1 - axis] // patch) * patch for axis in (1, 0)
        )
        states, *_ = self.model.vision_model(picture[:, :high, :wide].transpose(1, 2, 0)[None])
        return self.model.connector(states)[0]


def buckets(count: int, size: int) -> np.ndarray:
    """The learned position, of ``size``, that each of ``count`` evenly spaced patches takes; in float32 as torch does it."""
    boundaries = (np.arange(1, size) * (1 / size)).astype(np.float32)
    points = np.arange(count, dtype=np.float32) * np.float32(1 / count)
    return np.searchsorted(boundaries, np.minimum(points, np.float32(1 - 1e-6)), side="right")
