"""Short convolutions along a prompt on CUDA.

MLX 0.32 has cuDNN make a graph for each number of rows and positions (mlx/backend/cuda/conv.cpp, ``ConvCacheKey``), in 45 to
80 ms. Prompts have any length, so a convolution within channels is a sum of shifted products instead, in one launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.runtime.device import Device, device


class ShortConvolution(nn.Conv1d):
    def __call__(self, x: mx.array) -> mx.array:
        """Convolve (B, L, C). A decode step's one position stays MLX's: its shapes are few."""
        channels, taps, per_group = self.weight.shape
        length = x.shape[1] - self.dilation * (taps - 1)
        if (
            per_group != 1
            or channels != x.shape[2]
            or self.stride != 1
            or self.padding
            or length < 2
        ):
            return super().__call__(x)
        firsts = [self.dilation * tap for tap in range(taps)]
        found = _summed(
            [x[:, first : first + length] for first in firsts],
            [self.weight[:, tap, 0] for tap in range(taps)],
        )
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


def convolutions() -> Mapping[type, type]:
    """Return MLX's class -> this device's, if any."""
    return {nn.Conv1d: ShortConvolution} if device() is Device.CUDA else {}
