"""Rows a second of one worker and of several on a Ray cluster of this machine: python -m benchmarks.two_devices [--help]

The same pictures are asked about by one worker, then by several, in turn, in each round in the other order. Before it is
timed, every worker has answered rows. All answers must be equal. Workers are one a GPU; without GPUs, processes of
``--cpus`` cores each, which shows whether the driver keeps them busy and little else. The last line is JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import time
from collections.abc import Sequence

import numpy as np
from PIL import Image

from vlm_batch.jobs.ray import Cluster
from vlm_batch.types import Request, SamplingParams

#: Seconds that the workers are given to load the model.
PATIENCE = 900.0


def pictures(count: int, side: int, seed: int) -> list[bytes]:
    """JPEG files, each another one: a coarse pattern of colours."""
    chance = np.random.default_rng(seed)
    files = []
    for _ in range(count):
        coarse = Image.fromarray(chance.integers(0, 256, (12, 12, 3), np.uint8))
        out = io.BytesIO()
        coarse.resize((side, side)).save(out, "JPEG", quality=90)
        files.append(out.getvalue())
    return files


def requests(files: Sequence[bytes], tokens: int, name: str) -> list[Request]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [
        Request(
            images=[file],
            prompt="describe the picture",
            params=params,
            request_id=f"{name}-{number}",
        )
        for number, file in enumerate(files)
    ]


class Fleet:
    """A cluster whose workers have all loaded the model and answered rows."""

    def __init__(self, args: argparse.Namespace, workers: int) -> None:
        self.workers, self._ready = workers, 0
        self._cluster = Cluster(
            args.model,
            address="local",
            workers=workers,
            num_gpus=args.gpus,
            num_cpus=args.cpus,
            options={"max_rows": args.batch, "caches": None},
            say=self._heard,
        )

    def __enter__(self) -> Fleet:
        self._cluster.__enter__()
        began = time.monotonic()
        warm = pictures(4 * self.workers, 224, seed=1)
        while True:
            list(self._cluster.as_completed(requests(warm, 4, "warm")))
            if self._ready >= self.workers:
                break
            if time.monotonic() - began > PATIENCE:
                raise SystemExit(
                    f"{self._ready} of {self.workers} workers have started after {PATIENCE:.0f} s"
                )
            time.sleep(0.5)
        list(
            self._cluster.as_completed(
                requests(pictures(24 * self.workers, 224, seed=2), 4, "warm")
            )
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._cluster.close()

    def _heard(self, text: str) -> None:
        print(text, flush=True)
        self._ready += text.startswith("a worker is ready")

    def timed(self, asked: Sequence[Request]) -> tuple[float, dict[str, str]]:
        """(seconds, answers)."""
        began = time.perf_counter()
        results = [
            result.raise_for_error() for result in self._cluster.as_completed(asked)
        ]
        return time.perf_counter() - began, {
            result.request_id: result.text for result in results
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="folder or hub id (default: the embedded tiny checkpoint)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        help="compared with one (default: %(default)s)",
    )
    parser.add_argument(
        "--gpus", type=float, default=None, help="GPUs of a worker (default: 1, if any)"
    )
    parser.add_argument(
        "--cpus",
        type=float,
        default=1,
        help="cores set aside for a worker (default: %(default)s)",
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=256,
        help="pictures of a measurement (default: %(default)s)",
    )
    parser.add_argument(
        "--side",
        type=int,
        default=768,
        help="pixels of a picture's side (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens", type=int, default=64, help="of an answer (default: %(default)s)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=8,
        help="rows of a worker's batch (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="measurements of each (default: %(default)s)",
    )
    args = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    asked = requests(pictures(args.rows, args.side, seed=3), args.tokens, "row")
    seconds: dict[int, list[float]] = {1: [], args.workers: []}
    answers: dict[str, str] | None = None
    for number in range(args.rounds):
        for workers in (1, args.workers) if number % 2 == 0 else (args.workers, 1):
            with Fleet(args, workers) as fleet:
                took, told = fleet.timed(asked)
            answers = answers or told
            if told != answers:
                raise SystemExit("answers differ between runs")
            seconds[workers].append(took)
            print(f"{workers} workers: {args.rows / took:.2f} rows/s", flush=True)
    rates = {
        workers: args.rows / statistics.median(all_of)
        for workers, all_of in seconds.items()
    }
    ratio = rates[args.workers] / rates[1]
    print(
        f"{args.workers} workers answer {ratio:.2f} times as many rows a second as one (median of {args.rounds})"
    )
    figures = {"rows_a_second": rates, "seconds": seconds, "ratio": ratio, **vars(args)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
