"""Environment settings that MLX's GPU back ends read at their start.

Standard library only: this module runs before MLX's import.
"""

from __future__ import annotations

import os
import sys

#: Defaults for variables that are not set; ``MLX_USE_CUDA_GRAPHS=1`` keeps MLX's graphs. MLX caches graphs by the order of
#: their operations and by shared memory (mlx/backend/cuda/device.cpp, ``CommandEncoder::commit``). A batch that rows join
#: and leave hardly repeats: a chat takes twice as long as with single launches (docs/log.md). MLX frees memory per
#: group of operations: groups of 20 keep a prefill's peak low.
SETTINGS = {"MLX_USE_CUDA_GRAPHS": "0", "MLX_MAX_OPS_PER_BUFFER": "20"}
#: At 0, MLX does not raise "Cache thrashing is happening" after 512 shapes of attention on one thread (lru_cache.h,
#: ``emplace``). An engine's thread lives for weeks.
UNCHECKED = "MLX_ENABLE_CACHE_THRASHING_CHECK"
#: At 1, which is MLX's default, GPUs round the factors of float32 products to TF32, whose mantissa has 10 bits: CUDA's
#: products and convolutions, Metal's from the M5 on. MLX reads it at its first product.
TF32 = "MLX_ENABLE_TF32"


def keep_float32() -> None:
    """Let float32 be float32, unless the environment says otherwise."""
    os.environ.setdefault(TF32, "0")


def prefer_single_launches() -> None:
    """Set single launches without the thrashing check, unless the environment says otherwise.

    Linux only: on macOS one variable would change Metal's command buffers.
    """
    if not sys.platform.startswith("linux"):
        return
    os.environ.setdefault(UNCHECKED, "0")
    if "MLX_USE_CUDA_GRAPHS" in os.environ:
        return
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
