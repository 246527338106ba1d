"""Memory of the device and the host."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx


def release_memory() -> None:
    """Return MLX's and the C library's free memory to the system.

    CUDA frees at synchronisations: the first ends work that holds arrays, the second returns them.
    """
    gc.collect()
    _wait_for_device()
    mx.clear_cache()
    _wait_for_device()
    trim()


def trim() -> None:
    """Return the C library's freed memory, on Linux."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (AttributeError, OSError):  # another C library than glibc
            return


def _wait_for_device() -> None:
    # launched work has failed: its reader gets the error
    with contextlib.suppress(RuntimeError):
        mx.synchronize()


def default_limit() -> int:
    """Return the default limit of arrays: nine tenths of the memory, in bytes."""
    return (_total_bytes() or mx.get_memory_limit()) * 9 // 10


_forgotten_peak = 0


def peak_bytes() -> int:
    """Return the most bytes that MLX has held in this process."""
    return max(_forgotten_peak, mx.get_peak_memory())


def reset_peak() -> None:
    global _forgotten_peak
    _forgotten_peak = peak_bytes()
    mx.reset_peak_memory()


_wiring = threading.Lock()
_wired: list[int] = []  # per running engine, the limit that it replaced


@contextlib.contextmanager
def wired() -> Iterator[None]:
    """Keep a running engine's arrays resident on a Mac, up to Metal's recommended working set.

    Otherwise macOS may page out weights. The last engine's end restores the limit.
    """
    limit = (
        mx.device_info().get("max_recommended_working_set_size")
        if mx.metal.is_available()
        else None
    )
    if not isinstance(limit, int):
        yield
        return
    with _wiring:
        try:
            _wired.append(mx.set_wired_limit(limit))
        except (RuntimeError, ValueError):
            # macOS has no limit, or a lower one by sysctl: leave it
            _wired.append(-1)
    try:
        yield
    finally:
        with _wiring:
            if len(_wired) == 1 and _wired[0] >= 0:
                mx.set_wired_limit(_wired[0])
            del _wired[-1]


#: Share of all memory for arrays; the rest is for the system and for work in progress (a chunk, a picture's encoding).
SHARE = 0.8
#: Linux's files with a container's memory limit.
_CGROUP_FILES = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def free_bytes() -> int | None:
    """Return the bytes left for new arrays; None if unknown."""
    total = _total_bytes()
    return (
        None if total is None else max(0, int(total * SHARE) - mx.get_active_memory())
    )


def _total_bytes() -> int | None:
    """Return the GPU's memory, else the host's or container's."""
    info = mx.device_info()
    for name in ("max_recommended_working_set_size", "memory_size", "total_memory"):
        if isinstance(value := info.get(name), int) and value > 0:
            return value
    return min(_host_limits(), default=None)


def _host_limits() -> list[int]:
    found = []
    with contextlib.suppress(AttributeError, OSError, ValueError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for name in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path(name).read_text(encoding="ascii")))
    return [value for value in found if value > 0]
