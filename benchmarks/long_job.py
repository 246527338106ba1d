"""Memory and time of a long job: python -m benchmarks.long_job [--rows 50000] [--different 64 --side 28]

Rows of JSON lines, each with a tiny picture, are answered by the embedded checkpoint, two tokens each, into a file of JSON
lines. After every tenth of the rows: the most resident memory so far, what MLX holds, and processor time of a row since the
last line. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from PIL import Image
from rich.console import Console

from vlm_batch import Caches, SamplingParams, VLMBatcher, jobs
from vlm_batch.assets import default_checkpoint
from vlm_batch.jobs import Batcher, Item, Summary, Watch
from vlm_batch.types import Result

SIDE, DIFFERENT = 28, 64


class Sampling(Watch):
    """Notes memory and processor time after every so many rows."""

    def __init__(self, every: int, console: Console) -> None:
        self._every = every
        self._console = console
        self._rows = 0
        self.found: list[dict[str, float]] = []

    def began(self, batcher: Batcher, summary: Summary) -> None:
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def ended(self, item: Item, result: Result, in_flight: int) -> None:
        self._rows += 1
        if self._rows % self._every:
            return
        cpu = time.process_time()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.found.append(
            {
                "rows": self._rows,
                "most_resident_mb": peak
                * (1 if sys.platform == "darwin" else 1024)
                / 1e6,
                "mlx_mb": mx.get_active_memory() / 1e6,
                "cpu_ms_a_row": 1e3 * (cpu - self._cpu) / self._every,
                "seconds": time.perf_counter() - self._began,
            }
        )
        self._cpu = cpu
        self._console.print(
            ", ".join(f"{name} {value:.5g}" for name, value in self.found[-1].items())
        )


def write_rows(folder: Path, count: int, different: int, side: int) -> Path:
    """A table of rows, and the pictures that they name: so many different ones, in turn."""
    random = np.random.default_rng(0)
    for number in range(different):
        Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(
            folder / f"{number}.png"
        )
    with open(folder / "rows.jsonl", "w") as file:
        for number in range(count):
            file.write(
                json.dumps(
                    {"id": f"row-{number}", "image": f"{number % different}.png"}
                )
                + "\n"
            )
    return folder / "rows.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument(
        "--batch", type=int, default=32, help="rows in the batch (default: 32)"
    )
    parser.add_argument(
        "--cache-bytes",
        type=int,
        default=50_000_000,
        help="kept for later rows (default: 50 MB)",
    )
    parser.add_argument(
        "--different", type=int, default=DIFFERENT, help="pictures (default: 64)"
    )
    parser.add_argument(
        "--side",
        type=int,
        default=SIDE,
        help="pixels of a picture's side (default: 28)",
    )
    args = parser.parse_args()
    watch = Sampling(max(1, args.rows // 10), Console(width=120))
    questions = jobs.Questions(
        ("describe the picture",), params=SamplingParams(max_tokens=2, ignore_eos=True)
    )
    with tempfile.TemporaryDirectory() as folder:
        sources, _ = jobs.open_sources(
            [str(write_rows(Path(folder), args.rows, args.different, args.side))]
        )
        sink = jobs.open_sink(str(Path(folder) / "answers.jsonl"))
        with VLMBatcher(
            default_checkpoint(), max_rows=args.batch, caches=Caches(args.cache_bytes)
        ) as batcher:
            summary = jobs.run(sources, sink, batcher, questions=questions, watch=watch)
    print(
        json.dumps(
            {
                "answered": summary.answered,
                "failed": summary.failed,
                "course": watch.found,
            }
        )
    )


if __name__ == "__main__":
    main()
