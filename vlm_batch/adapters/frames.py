"""Fixes to mlx-vlm's video processors, the parts of processors that make patches of frames."""

from __future__ import annotations

import copy
import sys
from typing import Any


def keep_every_frame(part: Any, limit: str) -> Any:
    """A copy of a video processor that drops no frames, which are chosen already; ``limit`` names its bound."""
    patient = copy.copy(part)
    setattr(patient, limit, sys.maxsize)
    return patient
