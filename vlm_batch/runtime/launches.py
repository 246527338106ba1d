"""How MLX's CUDA back end launches its work: settings of its own that it reads from the environment when it starts.

MLX gathers operations into CUDA graphs and keeps those that it has seen, by the order of their operations and by which
of them share memory (mlx/backend/cuda/device.cpp, ``CommandEncoder::commit``). The steps of a batch that rows join and
leave hardly repeat in both: graphs are built anew, milliseconds each, and after 800 new ones in a process's life MLX
raises "Cache thrashing is happening" from whatever is being computed (lru_cache.h, ``emplace``). On an H100 a chat of
32 rows takes 14.7 s with graphs and 6.4 without, a decode step of 8 rows 27 and 14 ms (docs/benchmarks.md). Operations
are also sent off in parcels, whose memory comes back when a parcel is done: of 100 on an H100, of 20 elsewhere, which
keeps a prefill's peak at two fifths.

Standard library only: this module runs before anything that might import MLX.
"""

from __future__ import annotations

import os
import sys

#: What stands in the environment already is left as it is. ``MLX_USE_CUDA_GRAPHS=1`` keeps MLX's graphs.
SETTINGS = {"MLX_USE_CUDA_GRAPHS": "0", "MLX_MAX_OPS_PER_BUFFER": "20"}


def prefer_single_launches() -> None:
    """Ask MLX's CUDA back end to launch operations one by one, where nothing else has been asked of it.

    Linux only: on macOS one of the variables would change Metal's parcels. MLX on a CPU reads neither.
    """
    if sys.platform.startswith("linux") and "MLX_USE_CUDA_GRAPHS" not in os.environ:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
