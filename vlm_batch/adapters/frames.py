"""Corrections of mlx-vlm's video processors."""

from __future__ import annotations

import copy
import sys
from typing import Any

from vlm_batch.adapters.pictures import with_part


def keep_every_frame(processor: Any, kind: type, limit: str) -> Any:
    """Make the processor's video part (class ``kind``, bound ``limit``) keep all sampled frames."""

    def patient(part: Any) -> Any:
        if not isinstance(part, kind):
            return part
        part = copy.copy(part)
        setattr(part, limit, sys.maxsize)
        return part

    return with_part(processor, "video_processor", patient)
