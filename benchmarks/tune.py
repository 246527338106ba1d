"""``vlm-batch bench --tune`` on the models of ``benchmarks.compare``, whose weights are random.

    python -m benchmarks.tune                        a CPU, 47 M parameters, float32
    python -m benchmarks.tune --shape 3b             a GPU, the sizes of Qwen2.5-VL-3B, bfloat16
    python -m benchmarks.tune --kv-bits 8            the same with keys and values in few bits

Prints the measurements and the settings that they speak for, and JSON as the last line. Nothing is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from vlm_batch.runtime import blas

blas.preload_openblas()  # before anything imports mlx.core


from benchmarks.compare.engines import to_mlx  # noqa: E402
from benchmarks.compare.shapes import SHAPES, build  # noqa: E402
from benchmarks.compare.workloads import make_workload  # noqa: E402
from vlm_batch import tuning  # noqa: E402
from vlm_batch.caches.quantisation import quantisation_of  # noqa: E402
from vlm_batch.cli.tune import show  # noqa: E402
from vlm_batch.loading import adapt  # noqa: E402
from vlm_batch.policy import POLICIES, SETTINGS  # noqa: E402
from vlm_batch.runtime.device import device  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--kv-bits", type=float)
    parser.add_argument("--seconds", type=float, default=240.0, help="begin nothing new after this (default: 240)")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="of the BLAS on a CPU")
    args = parser.parse_args()
    blas.limit_threads(args.threads)
    shape, kind = SHAPES[args.shape], device()
    asks = make_workload("captions", shape).asks[:16]
    pictures = [to_mlx(ask) for ask in asks]
    adapter, kv = adapt(build(shape)), quantisation_of(args.kv_bits)
    measured = tuning.measure(
        adapter, kv, pictures, seconds=args.seconds, say=lambda said: print(said, file=sys.stderr)
    )
    found = tuning.settings_of(measured, POLICIES[kind])
    show(measured, found, POLICIES[kind], {name: one.source(kind) for name, one in SETTINGS.items()}, sys.stdout)
    print(json.dumps({"device": kind.value, "shape": args.shape, "settings": found, "measured": measured.as_json()}))


if __name__ == "__main__":
    main()
