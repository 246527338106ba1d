"""The kind of device that MLX computes on."""

from __future__ import annotations

from enum import Enum

import mlx.core as mx

#: Rows and columns of a product that goes to a GPU's matrix units.
MEASURED = 128


class Device(Enum):
    CPU = "cpu"
    CUDA = "cuda"
    METAL = "metal"


def device() -> Device:
    if mx.default_device().type != mx.DeviceType.gpu:
        return Device.CPU
    return Device.CUDA if mx.cuda.is_available() else Device.METAL


def rounds_float32() -> bool:
    """Whether products of float32 round their factors to TF32 here: measured, as MLX reads its setting only once."""
    if device() is Device.CPU:
        return False
    # TF32 keeps 10 bits behind the point
    fine = mx.full((MEASURED, MEASURED), 1 + 2.0**-12)
    return not mx.array_equal(fine @ mx.eye(MEASURED), fine).item()
