"""SmolVLM: Idefics 3 by another name."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import smolvlm

from ._types import TinyFamily
from .idefics3 import FACTS, build_with


def build() -> nn.Module:
    """Four layers of 64, two vision layers of 32."""
    return build_with(smolvlm, "smolvlm", 71)


FAMILY = TinyFamily(name="smolvlm", build=build, **FACTS)
