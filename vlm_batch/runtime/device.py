"""The kind of device that MLX computes on."""

from __future__ import annotations

from enum import Enum

import mlx.core as mx


class Device(Enum):
    """A back end of MLX's. What is measured on one says little about another."""

    CPU = "cpu"
    CUDA = "cuda"
    METAL = "metal"


def device() -> Device:
    """The back end of MLX's default device."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return Device.CPU
    return Device.CUDA if mx.cuda.is_available() else Device.METAL
