"""Settings for the launches of MLX's CUDA back end, which reads them from the environment when it starts.

MLX gathers operations into CUDA graphs and keeps those that it has seen, by the order of their operations and by which
of them share memory (mlx/backend/cuda/device.cpp, ``CommandEncoder::commit``). The steps of a batch that rows join and
leave hardly repeat in both. Graphs are therefore built anew, and a chat takes twice as long as with single launches
(docs/benchmarks.md). MLX also submits operations in groups, and frees a group's memory when it is done. By default a group
has 100 operations on an H100; 20 keep the peak of a prefill low.

What MLX keeps on CUDA (graphs, cuDNN's plans of attention and of convolutions; those a thread) is bounded: what was used
longest ago goes. But it counts what it makes, and once that is twice as much as it keeps, in all of a thread's life, raises
"Cache thrashing is happening" from whatever is being computed (lru_cache.h, ``emplace``): after 512 shapes of attention.
An engine's thread lives for weeks. So that check is off, whatever else is asked.

Standard library only: this module runs before anything that might import MLX.
"""

from __future__ import annotations

import os
import sys

#: Variables that are not set already. ``MLX_USE_CUDA_GRAPHS=1`` keeps MLX's graphs.
SETTINGS = {"MLX_USE_CUDA_GRAPHS": "0", "MLX_MAX_OPS_PER_BUFFER": "20"}
#: The variable that keeps MLX from raising an error for the number of shapes that a thread has seen.
UNCHECKED = "MLX_ENABLE_CACHE_THRASHING_CHECK"


def prefer_single_launches() -> None:
    """Ask MLX's CUDA back end to launch operations one by one, where nothing else has been asked of it, and never to fail for
    the number of shapes that came.

    Linux only: on macOS one of the variables would change Metal's parcels. MLX on a CPU reads none of them.
    """
    if sys.platform.startswith("linux"):
        os.environ.setdefault(UNCHECKED, "0")
    if sys.platform.startswith("linux") and "MLX_USE_CUDA_GRAPHS" not in os.environ:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
