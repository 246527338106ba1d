"""Memory given back to the system once it is not needed any more."""

from __future__ import annotations

import ctypes
import gc
import sys

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
