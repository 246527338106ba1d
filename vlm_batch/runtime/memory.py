"""Memory: how much there is, and given back to the system once it is not needed any more."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from pathlib import Path

import mlx.core as mx


def give_back() -> None:
    """Return free memory: what MLX keeps for its next arrays, and on Linux what the C library keeps between small ones.

    Many small arrays leave a heap with holes, which glibc does not return by itself.
    """
    gc.collect()
    mx.clear_cache()
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (AttributeError, OSError):  # another C library than glibc
            return


def usual_limit() -> int:
    """Bytes that arrays may take with room left for everything else: nine tenths of what the device bears.

    That is Metal's recommended working set, MLX's own limit elsewhere, or a container's.
    """
    known = mx.device_info().get("max_recommended_working_set_size")
    most = int(known) if known else mx.get_memory_limit()
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        most = min(most, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return most * 9 // 10
