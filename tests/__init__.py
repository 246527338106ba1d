"""Settings that must stand before anything imports MLX, for pytest and for commands: the fast BLAS, one thread a process."""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # several processes share the cores

from vlm_batch.runtime.blas import preload_openblas

preload_openblas()
