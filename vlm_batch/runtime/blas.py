"""A fast BLAS for MLX on Linux CPUs, found where it already lies.

MLX's Linux CPU wheel links netlib's reference BLAS, which is slow. opencv-python, on which mlx-vlm depends, ships
OpenBLAS under the standard names, which is many times as fast (docs/benchmarks.md). The dynamic linker takes the first
definition in global scope, so a library that is loaded with
``RTLD_GLOBAL`` before ``mlx.core`` is imported serves its calls; afterwards the symbols are bound and it is too late.

Standard library only: this module runs before anything that might import MLX.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys
from pathlib import Path

#: Set to 1 to keep MLX's own BLAS.
OPT_OUT = "VLM_BATCH_NO_BLAS"
#: OpenBLAS's own: which processor's kernels to use.
CORE_TYPE = "OPENBLAS_CORETYPE"
#: The processor's abilities that the kernels for Skylake-X need. The OpenBLAS of the wheels (0.3.15) knows no AMD processor
#: that has them, and would take slower kernels there (docs/benchmarks.md).
WIDE_VECTORS = frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})

#: Core types whose kernels use them.
WIDE_CORES = ("SKYLAKEX", "COOPERLAKE", "SAPPHIRERAPIDS", "ZEN4", "ZEN5")

_loaded: ctypes.CDLL | None = None
_path: Path | None = None


def preload_openblas() -> Path | None:
    """Load opencv-python's OpenBLAS for MLX to use, and return its path; calling it again returns the same path.

    Returns None, and does nothing, where it would be no use or is not wanted: another platform than Linux (Apple's
    Accelerate is fast), ``mlx.core`` imported already (too late), no OpenBLAS to be found, or ``VLM_BATCH_NO_BLAS=1``.
    Only float32 products on the CPU go through BLAS: on a GPU back end the library is loaded and never called.
    The number of threads is OpenBLAS's own business (``OPENBLAS_NUM_THREADS``; all cores by default).
    """
    global _loaded, _path
    if _path is not None:
        return _path
    if not sys.platform.startswith("linux") or os.environ.get(OPT_OUT) == "1" or "mlx.core" in sys.modules:
        return None
    for path in _candidates():
        library = _load(path)
        if library is not None:
            _loaded, _path = library, path
            return path
    return None


def limit_threads(threads: int) -> None:
    """Let the preloaded OpenBLAS use this many threads, unless the user's environment has set a number.

    For entry points, which own their process. A decode step's products are too small to share between two cores
    (docs/benchmarks.md, settings that were measured).
    """
    if _loaded is not None and not {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"} & os.environ.keys():
        _loaded.openblas_set_num_threads(ctypes.c_int(threads))


def has_wide_vectors(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether Linux says that the processor has AVX-512, in the parts that OpenBLAS's kernels use."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return False
    return set(flags.split()) >= WIDE_VECTORS


def narrow_kernels() -> str | None:
    """A sentence on kernels that the environment chose and that take twice as long as they need here; else None."""
    asked = os.environ.get(CORE_TYPE, "").upper()
    if _loaded is None or asked in ("", *WIDE_CORES) or not has_wide_vectors():
        return None
    return (
        f"{CORE_TYPE}={os.environ[CORE_TYPE]} keeps float32 products from this processor's AVX-512: they take up to twice "
        f"as long. Start Python without it (env -u {CORE_TYPE} python ...)"
    )


def _candidates() -> list[Path]:
    """OpenBLAS libraries with standard symbol names: those in the folder that the opencv wheel keeps beside ``cv2``."""
    spec = importlib.util.find_spec("cv2")
    if spec is None or spec.origin is None:
        return []
    site = Path(spec.origin).parent.parent
    return sorted(path for folder in sorted(site.glob("opencv_*.libs")) for path in folder.glob("libopenblas*.so*"))


def _load(path: Path) -> ctypes.CDLL | None:
    """The library in global scope, after the Fortran runtime it needs; None if it does not load or is not usable."""
    if CORE_TYPE not in os.environ and has_wide_vectors():
        os.environ[CORE_TYPE] = "SKYLAKEX"
    try:
        for name in ("libquadmath", "libgfortran"):
            for needed in sorted(path.parent.glob(f"{name}*.so*")):
                ctypes.CDLL(str(needed), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(
            str(path)
        )  # local first: a library that fails the check below must not stand in global scope
        library.cblas_sgemm, library.openblas_set_num_threads  # noqa: B018  (AttributeError when a symbol has another name)
        library.openblas_get_config.restype = ctypes.c_char_p
        if b"USE64BITINT" in library.openblas_get_config():  # MLX passes 32-bit sizes
            return None
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except (OSError, AttributeError):
        return None


def facts() -> dict[str, str]:
    """Facts by which kernels of float32 products are chosen: the library, its processor type and its threads; "" if unknown."""
    if _loaded is None or _path is None:
        return {"blas": "", "core": platform.processor(), "threads": ""}
    _loaded.openblas_get_corename.restype = ctypes.c_char_p
    core = (_loaded.openblas_get_corename() or b"").decode(errors="replace")
    return {"blas": _path.name, "core": core, "threads": str(_loaded.openblas_get_num_threads())}
