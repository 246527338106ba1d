"""Changes to vision towers that several families share: their activations and their learned positions."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.vision import adaptive_average, cubic_weights, resize_bicubic


def use_tanh_gelu(tower: nn.Module) -> None:
    """Give the working copy's tower GELU in its tanh form in place of the sigmoid's."""
    for _, module in tower.named_modules():
        if isinstance(module.get("activation_fn"), nn.GELU):
            module.activation_fn = nn.GELU(approx="tanh")


def resized_positions(parent: type[nn.Module]) -> type[nn.Module]:
    """MoonViT's learned positions, resized to each picture's grid by ``resize_bicubic``."""

    class ResizedPositions(parent):  # type: ignore[misc,valid-type]
        def __call__(self, x: mx.array, grids: mx.array, **shapes: Any) -> mx.array:
            """Patches (N, D) and grids (pictures, 2), or (clips, 3), which are upstream's own."""
            if grids.shape[1] != 2:
                return super().__call__(x, grids, **shapes)
            sizes = [(int(high), int(wide)) for high, wide in np.array(grids)]
            tables = [resize_bicubic(self.weight, size).flatten(0, 1) for size in sizes]
            return x + mx.concatenate(tables).astype(x.dtype)

    return ResizedPositions


def bicubic_embeddings(embeddings_class: type[nn.Module]) -> type[nn.Module]:
    """The class of a tower's learned positions, with the reference's interpolation."""

    class BicubicEmbeddings(embeddings_class):  # type: ignore[misc,valid-type]
        """Upstream samples linearly with zeros outside, on a comment that says bicubic (glm4v/vision.py:125);
        transformers: grid_sample(bicubic, border, align_corners=False) (Glm4vVisionEmbeddings)."""

        def __call__(
            self,
            embeddings: mx.array,
            lengths: list[int],
            image_shapes: mx.array,
            h_coords: mx.array,
            w_coords: mx.array,
        ) -> mx.array:
            """(N, D) patches plus their positions' embeddings."""
            table = self.position_embedding.weight  # (side * side, D)
            side = int(table.shape[0] ** 0.5)
            sizes = mx.concatenate(
                [
                    mx.repeat(shape[None], length, axis=0)
                    for shape, length in zip(image_shapes[:, 1:], lengths, strict=True)
                ]
            )  # (N, 2) rows and columns of each patch's picture
            rows, columns = (
                cubic_weights((coords + 0.5) / sizes[:, axis] * side - 0.5, side)
                for axis, coords in enumerate((h_coords, w_coords))
            )
            weights = (rows[:, :, None] * columns[:, None]).flatten(1)  # (N, side * side)
            return embeddings + (weights @ table.astype(mx.float32)).astype(table.dtype)

    return BicubicEmbeddings


def adaptive_pooling(parent: type) -> type:
    """Moondream's tower, whose crops are pooled by ``adaptive_average``."""

    class AdaptivePooling(parent):  # type: ignore[misc]
        """Upstream pools over rounded windows (moondream3/vision.py:114-140, moondream2 the same); Moondream's own code
        calls adaptive_avg_pool2d (moondream/torch/vision.py, vision_projection)."""

        def _reconstruct_local_features(self, crops: list[mx.array], layout: tuple[int, int]) -> mx.array:
            """Features (N, D) of each crop, row by row -> (N, D): neighbours' margins are cut off, the rest is pooled."""
            size, margin = self.config.crop_size // self.config.patch_size, self.config.overlap_margin
            high, wide = layout

            def inner(index: int, count: int) -> slice:
                return slice(margin if index else 0, size - margin if index < count - 1 else size)

            grids = [crop.reshape(size, size, -1) for crop in crops]
            rows = [
                mx.concatenate([grids[r * wide + c][inner(r, high), inner(c, wide)] for c in range(wide)], axis=1)
                for r in range(high)
            ]
            return adaptive_average(mx.concatenate(rows, axis=0), size).reshape(size * size, -1)

    return AdaptivePooling
