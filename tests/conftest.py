"""Settings that must stand before anything imports MLX: the fast BLAS, one thread for each test process, no hub."""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the processes of pytest -n share the cores
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from vlm_batch.runtime.blas import preload_openblas

preload_openblas()
