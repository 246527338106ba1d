"""``vlm-batch bench --tune`` on the models of ``benchmarks.compare``, whose weights are random.

    python -m benchmarks.tune                        a CPU, 47 M parameters, float32
    python -m benchmarks.tune --shape 3b             a GPU, the sizes of Qwen2.5-VL-3B, bfloat16
    python -m benchmarks.tune --kv-bits 8            the same with keys and values in few bits

Prints the measurements and the settings that they speak for, and JSON as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict

from vlm_batch.runtime import blas

blas.preload_openblas()  # before anything imports mlx.core


from benchmarks.compare.engines import to_mlx  # noqa: E402
from benchmarks.compare.shapes import SHAPES, build  # noqa: E402
from benchmarks.compare.workloads import make_workload  # noqa: E402
from vlm_batch.caches.quantisation import KVQuantisation  # noqa: E402
from vlm_batch.cli.measuring import measure, settings_of  # noqa: E402
from vlm_batch.cli.tune import show  # noqa: E402
from vlm_batch.loading import adapt  # noqa: E402
from vlm_batch.runtime.device import device  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--kv-bits", type=float)
    parser.add_argument(
        "--seconds",
        type=float,
        default=240.0,
        help="begin nothing new after this (default: 240)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, (os.cpu_count() or 1) // 2),
        help="of the BLAS on a CPU",
    )
    args = parser.parse_args()
    blas.limit_threads(args.threads)
    shape = SHAPES[args.shape]
    asks = make_workload("captions", shape).asks[:16]
    pictures = [to_mlx(ask) for ask in asks]
    adapter = adapt(build(shape))
    kv = KVQuantisation(args.kv_bits) if args.kv_bits else None
    measured = measure(
        adapter,
        kv,
        pictures,
        seconds=args.seconds,
        say=lambda said: print(said, file=sys.stderr),
    )
    found = settings_of(measured)
    show(measured, found, sys.stdout)
    print(
        json.dumps(
            {
                "device": device().value,
                "shape": args.shape,
                "settings": found,
                "measured": asdict(measured),
            }
        )
    )


if __name__ == "__main__":
    main()
