"""Memory: how much there is, and given back to the system once it is not needed any more."""

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


def give_back() -> None:
    """Return free memory: what MLX keeps for its next arrays, and on Linux what the C library keeps between small ones.

    Many small arrays leave a heap with holes, which glibc does not return by itself. CUDA's pool returns what is freed when
    the device is waited for: before, what is under way holds arrays, and after, it is free for others.
    """
    gc.collect()
    _wait_for_device()
    mx.clear_cache()
    _wait_for_device()
    trim()


def trim() -> None:
    """Return what the C library keeps of freed memory, on Linux: other systems' libraries do so by themselves."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (AttributeError, OSError):  # another C library than glibc
            return


def _wait_for_device() -> None:
    with contextlib.suppress(RuntimeError):  # what was launched has failed: whoever reads it is told
        mx.synchronize()


def usual_limit() -> int:
    """Bytes that arrays may take with room left for everything else: nine tenths of what the device has."""
    return (_total_bytes() or mx.get_memory_limit()) * 9 // 10


_forgotten_peak = 0


def peak_bytes() -> int:
    """The most that MLX has held at once in this process."""
    return max(_forgotten_peak, mx.get_peak_memory())


def begin_peak() -> None:
    """Have ``mx.get_peak_memory`` begin anew; ``peak_bytes`` goes on."""
    global _forgotten_peak
    _forgotten_peak = peak_bytes()
    mx.reset_peak_memory()


_wiring = threading.Lock()
_wired: list[int] = []  # for each engine that runs, the limit that its start replaced


@contextlib.contextmanager
def wired() -> Iterator[None]:
    """Keep arrays resident on a Mac while an engine runs, up to the working set that Metal recommends; elsewhere nothing.

    Without it the system may page weights out between two steps, which makes large models slow; mlx-vlm's generators do
    the same. The limit is the process's: it is the last engine to end that puts back what the first one found.
    """
    limit = mx.device_info().get("max_recommended_working_set_size") if mx.metal.is_available() else None
    if not isinstance(limit, int):
        yield
        return
    with _wiring:
        try:
            _wired.append(mx.set_wired_limit(limit))
        except (RuntimeError, ValueError):  # a macOS that has none, or a lower one by sysctl: as it was
            _wired.append(-1)
    try:
        yield
    finally:
        with _wiring:
            if len(_wired) == 1 and _wired[0] >= 0:
                mx.set_wired_limit(_wired[0])
            del _wired[-1]


#: Of all memory that there is: the rest is the system's, and for work in progress (a prompt's chunk, a picture's encoding).
SHARE = 0.8
#: Where Linux says how much a container may have.
_CGROUP_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def free_bytes() -> int | None:
    """Bytes that the device has for arrays beside those that MLX holds now; None if that is not known."""
    total = _total_bytes()
    return None if total is None else max(0, int(total * SHARE) - mx.get_active_memory())


def _total_bytes() -> int | None:
    """Of the GPU, or of the machine or the container that this process is in, where arrays lie in the same memory."""
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
