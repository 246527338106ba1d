"""A fast BLAS for MLX on Linux CPUs.

MLX's Linux wheel links netlib's slow reference BLAS; opencv-python ships OpenBLAS (docs/log.md). The linker takes the
first global definition, so OpenBLAS must be loaded before ``mlx.core``.

Standard library only: this module runs before MLX's import.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys
import warnings
from pathlib import Path

#: Set to 1 to keep MLX's own BLAS.
OPT_OUT = "VLM_BATCH_NO_BLAS"
#: OpenBLAS's own variable, the processor whose kernels it uses.
CORE_TYPE = "OPENBLAS_CORETYPE"
#: CPU flags that the Skylake-X kernels need. The wheels' OpenBLAS (0.3.15) knows no AMD processor that has them, and
#: would choose slower kernels there (docs/log.md).
WIDE_VECTORS = frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})

#: Core types whose kernels use them.
WIDE_CORES = ("SKYLAKEX", "COOPERLAKE", "SAPPHIRERAPIDS", "ZEN4", "ZEN5")

#: Said once, where MLX has bound its own BLAS already.
TOO_LATE = (
    "mlx.core was imported before vlm_batch, so float32 products on this CPU take about twenty times as long: put"
    f" 'import vlm_batch' above the first import of mlx ({OPT_OUT}=1 silences this)"
)

_loaded: ctypes.CDLL | None = None
_path: Path | None = None


def preload_openblas() -> Path | None:
    """Load opencv-python's OpenBLAS for MLX's float32 products on a Linux CPU, once.

    Returns:
        The library's path; None without one, after the import of ``mlx.core``, or with ``VLM_BATCH_NO_BLAS=1``.
    """
    global _loaded, _path
    if _path is not None:
        return _path
    if not sys.platform.startswith("linux") or os.environ.get(OPT_OUT) == "1":
        return None
    if "mlx.core" in sys.modules:
        if _is_slow():
            warnings.warn(TOO_LATE, stacklevel=3)
        return None
    for path in _candidates():
        library = _load(path)
        if library is not None:
            _loaded, _path = library, path
            return path
    return None


def limit_threads(threads: int) -> None:
    """Set OpenBLAS's threads for the process, unless the environment has. For programs only."""
    is_set = {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"} & os.environ.keys()
    if _loaded is not None and not is_set:
        _loaded.openblas_set_num_threads(ctypes.c_int(threads))


def threads() -> int:
    """Return OpenBLAS's threads; 1 without it."""
    return 1 if _loaded is None else int(_loaded.openblas_get_num_threads())


def has_wide_vectors() -> bool:
    """Whether ``/proc/cpuinfo`` lists the AVX-512 parts that OpenBLAS's kernels use."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return False
    return set(flags.split()) >= WIDE_VECTORS


def narrow_kernels() -> str | None:
    """Return a warning if the environment keeps kernels from using AVX-512; else None."""
    asked = os.environ.get(CORE_TYPE, "").upper()
    if _loaded is None or asked in ("", *WIDE_CORES) or not has_wide_vectors():
        return None
    return (
        f"{CORE_TYPE}={os.environ[CORE_TYPE]} keeps float32 products from this processor's AVX-512: they take up to twice "
        f"as long. Start Python without it (env -u {CORE_TYPE} python ...)"
    )


def _is_slow() -> bool:
    """Return whether MLX, which is there already, computes on the CPU with the reference BLAS that its wheel brings."""
    mx = sys.modules["mlx.core"]
    if mx.default_device().type != mx.DeviceType.cpu or not _candidates():
        return False
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            names = {line.rsplit("/", 1)[-1].strip() for line in lines if "/" in line}
    except OSError:  # a system without /proc does not say
        return False
    return any(name.startswith("libblas") for name in names)


def _candidates() -> list[Path]:
    spec = importlib.util.find_spec("cv2")
    if spec is None or spec.origin is None:
        return []
    site = Path(spec.origin).parent.parent
    return sorted(site.glob("opencv_*.libs/libopenblas*.so*"))


def _load(path: Path) -> ctypes.CDLL | None:
    """Load a library and its Fortran runtime globally; None if MLX cannot use it."""
    if CORE_TYPE not in os.environ and has_wide_vectors():
        os.environ[CORE_TYPE] = "SKYLAKEX"
    try:
        for name in ("libquadmath", "libgfortran"):
            for needed in sorted(path.parent.glob(f"{name}*.so*")):
                ctypes.CDLL(str(needed), mode=ctypes.RTLD_GLOBAL)
        # Local first: a library that fails the checks must not enter the global scope.
        library = ctypes.CDLL(str(path))
        library.cblas_sgemm, library.openblas_set_num_threads  # noqa: B018  (AttributeError if they have other names)
        library.openblas_get_config.restype = ctypes.c_char_p
        if b"USE64BITINT" in library.openblas_get_config():  # MLX passes 32-bit sizes
            return None
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except (OSError, AttributeError):
        return None


def version() -> str:
    """Return OpenBLAS's version, such as "0.3.15"; "" without it."""
    if _loaded is None:
        return ""
    _loaded.openblas_get_config.restype = ctypes.c_char_p
    words = (_loaded.openblas_get_config() or b"").decode(errors="replace").split()
    return words[1] if len(words) > 1 else ""


def facts() -> dict[str, str]:
    """Return what decides float32 kernels: library, core type and threads; "" if unknown."""
    if _loaded is None or _path is None:
        return {"blas": "", "core": platform.processor(), "threads": ""}
    _loaded.openblas_get_corename.restype = ctypes.c_char_p
    core = (_loaded.openblas_get_corename() or b"").decode(errors="replace")
    return {
        "blas": _path.name,
        "core": core,
        "threads": str(_loaded.openblas_get_num_threads()),
    }
