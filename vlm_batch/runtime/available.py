"""The memory that the system has left, read anew at each call."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class Available:
    """Bytes that programs can still get without swapping, of all bytes of the machine or container.

    ``is_critical`` if the system itself says that it ends programs soon.
    """

    nbytes: int
    total: int
    is_critical: bool = False

    def has(self, nbytes: float) -> bool:
        """Return whether so many bytes are left, and the system does not say otherwise."""
        return not self.is_critical and self.nbytes >= nbytes


def available() -> Available | None:
    """Return today's figures; None where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
        if sys.platform == "darwin":
            return of_macos(sysctl)
        if sys.platform == "linux":
            return of_linux(ROOT)
    return None


# Linux, and its containers --------------------------------------------------------------------------------------------

#: A container's limit, its use, and the name of its cached files in memory.stat: cgroups 2 and 1.
_CGROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def of_linux(root: Path) -> Available:
    """Return the machine's figures, or the container's if it has less. Raises OSError, ValueError, KeyError."""
    told = _numbers(root / "proc/meminfo")
    least = Available(1024 * told["MemAvailable:"], 1024 * told["MemTotal:"])
    for names in _CGROUPS:
        with contextlib.suppress(OSError, ValueError, KeyError):
            found = _of_cgroup(root / "sys/fs/cgroup", *names)
            if found.total < least.total:
                nbytes = min(found.nbytes, least.nbytes)
                least = Available(nbytes, found.total)
    return least


def _of_cgroup(folder: Path, limit: str, use: str, cached: str) -> Available:
    most = int((folder / limit).read_text(encoding="ascii"))
    used = int((folder / use).read_text(encoding="ascii"))
    told = _numbers((folder / limit).parent / "memory.stat")
    # files that were read count as used, and are dropped when room is needed
    return Available(max(0, most - used + told[cached]), most)


def _numbers(path: Path) -> dict[str, int]:
    """Return the first number of each line, by its name."""
    found: dict[str, int] = {}
    for line in path.read_text(encoding="ascii").splitlines():
        name, number, *_ = line.split()
        found[name] = int(number)
    return found


# macOS ----------------------------------------------------------------------------------------------------------------

#: Value of kern.memorystatus_vm_pressure_level from which programs are ended.
_CRITICAL = 4


def of_macos(read: Callable[[str, int], int]) -> Available:
    """Return what the kernel tells: the percentage that ``memory_pressure`` prints, and its level of pressure.

    Args:
        read: returns a value of sysctl by its name and its bytes. Raises OSError.
    """
    total = read("hw.memsize", 8)
    percent = read("kern.memorystatus_level", 4)
    level = read("kern.memorystatus_vm_pressure_level", 4)
    return Available(total * percent // 100, total, level >= _CRITICAL)


def sysctl(name: str, size: int) -> int:
    """Return a number of sysctl. Raises OSError, and AttributeError where there is no such call."""
    value = ctypes.create_string_buffer(size)
    length = ctypes.c_size_t(size)
    call = ctypes.CDLL(None).sysctlbyname
    failed = call(name.encode(), value, ctypes.byref(length), None, 0)
    if failed:
        raise OSError(f"sysctl has no {name}")
    return int.from_bytes(value.raw[: length.value], sys.byteorder)
