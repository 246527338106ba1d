"""Fixes to mlx-vlm's video processors, the parts of processors that make patches of frames."""

from __future__ import annotations

import copy
import sys
from typing import Any

from vlm_batch.adapters.pictures import with_part


def keep_every_frame(processor: Any, kind: type, limit: str) -> Any:
    """A processor whose part for videos, of mlx-vlm's ``kind``, drops no frames: they are chosen already. ``limit`` names its
    bound."""

    def patient(part: Any) -> Any:
        if not isinstance(part, kind):
            return part
        part = copy.copy(part)
        setattr(part, limit, sys.maxsize)
        return part

    return with_part(processor, "video_processor", patient)
