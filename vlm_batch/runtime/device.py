"""The kind of device that MLX computes on."""

from __future__ import annotations

from enum import Enum

import mlx.core as mx


class Device(Enum):
    CPU = "cpu"
    CUDA = "cuda"
    METAL = "metal"


def device() -> Device:
    if mx.default_device().type != mx.DeviceType.gpu:
        return Device.CPU
    return Device.CUDA if mx.cuda.is_available() else Device.METAL
