"""Gemma 4 (26B-A4B's shape): experts, values that are keys in full layers, pictures that attend both ways."""

from __future__ import annotations

import mlx.nn as nn

from ._types import TinyFamily
from .gemma4 import BOTH_WAYS, EXPERTS, build_with


def build() -> nn.Module:
    """Four layers of 64, four experts in each."""
    return build_with(94, **EXPERTS)


FAMILY = TinyFamily(
    name="gemma4_experts", build=build, variant_of="gemma4", **BOTH_WAYS
)
