"""float32 products on a Linux CPU with MLX's own BLAS and with the preloaded one: python benchmarks/blas.py

Each variant runs in a process of its own, because a library is bound when MLX is loaded. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

# n, m, k
SHAPES = (
    (1024, 1024, 1024),
    (512, 96, 96),
    (256, 512, 512),
    (8, 512, 2048),
    (1, 512, 2048),
)
VARIANTS = {
    "mlx's own": {"VLM_BATCH_NO_BLAS": "1"},
    "openblas, 1 thread": {"OPENBLAS_NUM_THREADS": "1"},
    "openblas, all cores": {},
}


def measure() -> list[float]:
    """GFLOP/s of each shape: the best of three runs of a tenth of a second or more."""
    from vlm_batch.runtime.blas import preload_openblas

    preload_openblas()
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    found = []
    for n, m, k in SHAPES:
        a, b = mx.random.normal((n, k)), mx.random.normal((m, k)).T
        mx.eval(a, b, a @ b)
        best = 0.0
        for _ in range(3):
            began, count = time.perf_counter(), 0
            while (seconds := time.perf_counter() - began) < 0.1 or not count:
                mx.eval(a @ b)
                count += 1
            best = max(best, 2 * n * m * k * count / seconds / 1e9)
        found.append(round(best, 1))
    return found


def main() -> None:
    if "--measure" in sys.argv:
        print(json.dumps(measure()))
        return
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OPENBLAS_NUM_THREADS", "VLM_BATCH_NO_BLAS")
    }
    results = {}
    for name, settings in VARIANTS.items():
        command = [sys.executable, __file__, "--measure"]
        run = subprocess.run(
            command,
            env={**plain, **settings},
            check=True,
            capture_output=True,
            text=True,
        )
        results[name] = json.loads(run.stdout)
    print(
        f"{'GFLOP/s':<20}"
        + "".join(f"{'x'.join(map(str, shape)):>18}" for shape in SHAPES)
    )
    for name, speeds in results.items():
        print(f"{name:<20}" + "".join(f"{speed:>18}" for speed in speeds))
    print(json.dumps({"shapes": SHAPES, "gflops": results}))


if __name__ == "__main__":
    main()
