"""Changes to vision towers that several families share: their activations and their learned positions."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.vision import resize_bicubic

#: Why pictures of several requests do not share a call of some towers (``Adapter.encodes_apart``).
PICTURES_MASKED_APART = (
    "its tower masks pictures apart in one attention over all of them: the work grows with its square, and what is not finite "
    "in one reaches the others"
)


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
