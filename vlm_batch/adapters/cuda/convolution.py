"""Convolutions along a prompt and of patches, without a graph for every shape.

MLX 0.32 has cuDNN make a graph for each number of rows and positions (mlx/backend/cuda/conv.cpp, ``ConvCacheKey``), in 45 to
80 ms. Prompts have any length, so a convolution within channels is a sum of shifted products instead, in one launch. One of
patches that do not overlap is a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class ShortConvolution(nn.Conv1d):
    def __call__(self, x: mx.array) -> mx.array:
        """Convolve (B, L, C). A decode step's one position stays MLX's: its shapes are few."""
        channels, taps, per_group = self.weight.shape
        length = x.shape[1] - self.dilation * (taps - 1)
        needs = (
            per_group == 1,
            channels == x.shape[2],
            self.stride == 1,
            not self.padding,
            length > 1,
        )
        if not all(needs):
            return super().__call__(x)
        shifted, weights = [], []
        for tap in range(taps):
            first = self.dilation * tap
            shifted.append(x[:, first : first + length])
            weights.append(self.weight[:, tap, 0])
        found = _summed(shifted, weights)
        return found + self.bias if "bias" in self else found


@partial(mx.compile, shapeless=True)
def _summed(shifted: Sequence[mx.array], weights: Sequence[mx.array]) -> mx.array:
    """Sum (B, L, C) by weights (C), in float32."""
    products = [
        rows.astype(mx.float32) * weight.astype(mx.float32)
        for rows, weight in zip(shifted, weights, strict=True)
    ]
    found = products[0]
    for product in products[1:]:
        found = found + product
    return found.astype(shifted[0].dtype)


def embed_patches(projection: Any, patches: mx.array) -> mx.array:
    """Return patches (N, values), colour first, times a convolution's weight, as one product: (N, D)."""
    # (D, time, rows, columns, colours)
    kernel = projection.weight
    weight = kernel.transpose(0, 4, 1, 2, 3).reshape(len(kernel), -1)
    rows = patches.reshape(-1, weight.shape[1])
    if "bias" in projection:
        return mx.addmm(projection.bias, rows, weight.T)
    return rows @ weight.T
