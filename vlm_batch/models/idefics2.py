"""Idefics 2: pictures in their own shapes, and a perceiver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.placeholders import PlacingAdapter
from vlm_batch.errors import InvalidPrompt
from vlm_batch.models.idefics3 import Idefics3
from vlm_batch.registry import ModelSpec, register


class TanhGELU(nn.GELU):
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
            "a picture's last pixels count where they fill a patch, whatever lies beside it, as in transformers "
            "(modeling_idefics2.py, get_image_features); mlx-vlm counts a patch of which a part is padding (idefics2.py:243)",
        ),
    )
)
class Idefics2(PlacingAdapter, Idefics3):
    embeddings = "embed_tokens"
    input_keys = frozenset({"pixel_values", "pixel_attention_mask"})

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.idefics2.vision import VisionEmbeddings

        class EvenPositions(VisionEmbeddings):
            """Positions of patches as in transformers (modeling_idefics2.py), not uneven (idefics2/vision.py:131-157)."""

            def __call__(self, x: mx.array, mask: Any = None) -> mx.array:
                patches = self.patch_embedding(x)  # (1, rows, columns, D)
                rows, columns = (
                    buckets(count, self.num_patches) for count in patches.shape[1:3]
                )
                places = mx.array(
                    (rows[:, None] * self.num_patches + columns).reshape(-1)
                )
                return patches.flatten(1, 2) + self.position_embedding(places)

        return {VisionEmbeddings: EvenPositions, nn.GELU: TanhGELU}

    def check_placeholders(self, ids: Any, extra: Mapping[str, Any]) -> None:
        Adapter.check_placeholders(self, ids, extra)

    def encode_pictures(
        self, extra: Mapping[str, Any], dtype: mx.Dtype
    ) -> list[mx.array]:
        """Encode each picture alone; pictures of zeros are padding."""
        pictures = extra["pixel_values"].flatten(0, 1)  # (N, 3, H, W)
        masks = extra.get("pixel_attention_mask")
        masks = (
            mx.ones((len(pictures), *pictures.shape[2:]))
            if masks is None
            else masks.flatten(0, 1)
        )
        return [
            self._encode(*one)
            for one in zip(pictures, masks, strict=True)
            if mx.any(one[0] != 0).item()
        ]

    def _encode(self, picture: mx.array, mask: mx.array) -> mx.array:
        """(3, H, W) and mask (H, W) -> (latents, D)."""
        patch = self.config.vision_config.patch_size
        own = np.array(mask) != 0
        high, wide = (int(own.any(axis=axis).sum()) // patch * patch for axis in (1, 0))
        if not high or not wide:
            size = f"{own.any(1).sum()}x{own.any(0).sum()}"
            raise InvalidPrompt(
                f"a picture's own pixels are {size}, less than a patch of {patch}"
            )
        states, *_ = self.model.vision_model(
            picture[:, :high, :wide].transpose(1, 2, 0)[None]
        )
        return self.model.connector(states)[0]


def buckets(count: int, size: int) -> np.ndarray:
    """Return learned positions, of ``size``, of ``count`` even patches."""
    boundaries = (np.arange(1, size) * (1 / size)).astype(np.float32)
    points = np.arange(count, dtype=np.float32) * np.float32(1 / count)
    return np.searchsorted(
        boundaries, np.minimum(points, np.float32(1 - 1e-6)), side="right"
    )
