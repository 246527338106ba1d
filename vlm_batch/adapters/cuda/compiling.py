"""Kernels that MLX's CUDA back end compiles when they are first called, and keeps on disk.

Those of products in few bits take 20 to 60 s each (H100, MLX 0.32.4), and a model needs one or two for each number of rows
in ``ROWS``. Prompts would wait for them one after another; here processes compile them at once, before the first prompt.
Layers that our own kernel multiplies need none (``qmm``).
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.adapters.cuda import qmm
from vlm_batch.runtime.device import Device, device

logger = logging.getLogger(__name__)

#: Rows of a product up to which a kernel of its own is used; the last serves any more. Fewer than 8 need none.
ROWS = (16, 32, 64)
#: Longest wait for a process: it is the first prompt that compiles, then.
MOST_SECONDS = 300.0
#: Outputs of a product: MLX has another kernel where they are no multiple of ``FULL``, in float32 and in other bits than 4
#: and 8.
WIDTHS = (1536, 1544)
FULL = 128
#: Classes for which an adapter has its own on CUDA (``operations.LAYERS``).
OURS = (nn.QuantizedLinear, nn.QuantizedEmbedding)
PRODUCT = """
import sys
import mlx.core as mx
kind, mode, (group, bits, width, rows) = getattr(mx, sys.argv[1]), sys.argv[2], map(int, sys.argv[3:])
packed = mx.quantize(mx.ones((width, 1536), kind), group, bits, mode)
how = {"transpose": True, "group_size": group, "bits": bits, "mode": mode}
mx.eval(mx.quantized_matmul(mx.ones((rows, 1536), kind), *packed, **how))
"""


class Packing(NamedTuple):
    """A layer's packing, the type that it computes in, and which of ``WIDTHS`` stands for its own."""

    dtype: str
    mode: str
    group_size: int
    bits: int
    width: int

    def is_built(self, rows: int) -> bool:
        is_naive = (
            self.width % FULL or self.dtype == "float32" or self.bits not in (4, 8)
        )
        name = f"qmm_{'naive' if is_naive else 'sm*'}_*{self.dtype}_m{rows}_b{self.bits}_g{self.group_size}_{self.mode}.ptx"
        return next(_folder().glob(name), None) is not None


def compile_products(model: nn.Module) -> None:
    """Compile the kernels of a quantised model's products, where MLX would do so later."""
    if device() is not Device.CUDA:
        return
    missing = [
        (one, rows)
        for one in sorted(packings(model))
        for rows in ROWS
        if not one.is_built(rows)
    ]
    if not missing:
        return
    begin, count = time.monotonic(), len(missing)
    logger.warning(
        "MLX compiles %d kernels for this model, once on this machine: about a minute",
        count,
    )
    _run([[*map(str, (*one, rows))] for one, rows in missing])
    logger.info("compiled %d kernels in %.0f s", count, time.monotonic() - begin)


def packings(model: nn.Module) -> set[Packing]:
    """Return how the quantised layers of a model are packed that MLX multiplies."""
    found = set()
    for module in model.modules():
        layer: Any = module
        if not _is_quantised(layer) or (type(layer) in OURS and qmm.suits(layer)):
            continue
        packing = Packing(
            _computes_in(layer),
            getattr(layer, "mode", "affine"),
            layer.group_size,
            layer.bits,
            WIDTHS[layer.scales.shape[-2] % FULL > 0],
        )
        found.add(packing)
    return found


def _is_quantised(layer: Any) -> bool:
    if "scales" not in layer or layer.scales.ndim < 2:
        return False
    return hasattr(layer, "bits") and hasattr(layer, "group_size")


def _computes_in(layer: Any) -> str:
    """Return a layer's type. Without biases, scales have another; such layers mostly compute in bfloat16."""
    dtype = layer.scales.dtype if "biases" in layer else mx.bfloat16
    return str(dtype).removeprefix("mlx.core.")


def _folder() -> Path:
    """Return the folder in which MLX keeps compiled kernels (mlx/backend/cuda/jit_module.cpp, ``ptx_cache_dir``)."""
    own = os.environ.get("MLX_PTX_CACHE_DIR")
    return (
        Path(own) if own else Path(tempfile.gettempdir(), "mlx", version("mlx"), "ptx")
    )


def _run(products: Iterable[list[str]]) -> None:
    """Run products, each in a process. A failure costs nothing: the first prompt compiles what is missing."""
    running: list[subprocess.Popen[bytes]] = []
    until = time.monotonic() + MOST_SECONDS
    try:
        for one in products:
            command = [sys.executable, "-c", PRODUCT, *one]
            running.append(
                subprocess.Popen(
                    command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
                )
            )
        for process in running:
            _, said = process.communicate(timeout=max(0.0, until - time.monotonic()))
            if process.returncode:
                lines = said.decode(errors="replace").strip().splitlines()
                logger.warning(
                    "a kernel could not be compiled: %s",
                    lines[-1] if lines else process.returncode,
                )
    except subprocess.TimeoutExpired:
        logger.warning(
            "kernels were not compiled within %.0f s; the first prompt waits for them",
            MOST_SECONDS,
        )
    except OSError as error:
        logger.warning(
            "kernels could not be compiled: %s; the first prompt waits for them", error
        )
    finally:
        for process in running:  # that have not ended: too slow, or interrupted
            process.kill()
            process.communicate()
