"""Ten times as many requests as fit into memory, and each one's wait against its place in line.

python -m tests.fairness --requests 300 --fit 30
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_batch import Result, SamplingParams, VLMBatcher, assets
from vlm_batch.engine.memory import RowMemory

PICTURES = Path(__file__).parent.parent / "fixtures" / "images"
#: Requests that are read ahead of the batch, and that may therefore go in another order than they came.
LOOK_AHEAD = 16


@dataclass(frozen=True)
class Waited:
    """A request: its place in line, seconds until it had a place in the batch, and how many behind it had one before."""

    place: int
    seconds: float
    overtaken: int
    result: Result


def asked(number: int) -> dict[str, Any]:
    """Requests of different lengths, every third with a picture."""
    params = SamplingParams(max_tokens=8 + 5 * (number % 7), ignore_eos=True)
    if number % 3 == 2:
        return {
            "images": PICTURES / "red_circle.png",
            "prompt": "describe the picture",
            "params": params,
        }
    return {"prompt": f"count to {number % 9 + 1}", "params": params}


def oversubscribe(requests: int, fit: int) -> tuple[list[Waited], int, float]:
    """All at once where ``fit`` rows fit into memory: (the waits in line, the most rows at a time, seconds in all)."""
    model = assets.default_checkpoint()
    with VLMBatcher(model, max_bytes=2**40) as own:
        memory = own._loop.generator.memory
        assert isinstance(memory, RowMemory)
        # all rows have fewer tokens than are allocated at a time
        row = memory.of(100)
    with VLMBatcher(
        model,
        max_rows=4 * fit,
        max_bytes=int(row * (fit + 0.5)),
        policy={"look_ahead": LOOK_AHEAD},
    ) as own:
        begin = time.perf_counter()
        handles = [own.submit(**asked(number)) for number in range(requests)]
        most = 0
        while not handles[-1].done():
            stats = own.stats()
            most = max(most, stats.decoding + stats.prefilling)
            time.sleep(0.01)
        results = [handle.result(timeout=600) for handle in handles]
        seconds = time.perf_counter() - begin
    waits = [result.timings.queue for result in results]
    return (
        [
            Waited(
                place, wait, sum(later < wait for later in waits[place + 1 :]), result
            )
            for place, (wait, result) in enumerate(zip(waits, results, strict=True))
        ],
        most,
        seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--fit", type=int, default=30, help="rows that fit at a time")
    options = parser.parse_args()
    waited, most, seconds = oversubscribe(options.requests, options.fit)
    failed = sum(not one.result.ok for one in waited)
    print(
        f"{len(waited)} requests, at most {most} rows at a time, {seconds:.1f} s, {failed} failed"
    )
    print(
        "place in line   wait: median   most   of an even share: most   overtaken: most"
    )
    tenth = -(-len(waited) // 10)
    for first in range(0, len(waited), tenth):
        part = waited[first : first + tenth]
        waits = [one.seconds for one in part]
        share = max(
            one.seconds / (seconds * (one.place + options.fit) / len(waited))
            for one in part
        )
        print(
            f"{first:6}-{first + len(part) - 1:<6}   {statistics.median(waits):10.2f} s {max(waits):6.2f} s "
            f"{share:20.2f} {max(one.overtaken for one in part):20}"
        )


if __name__ == "__main__":
    main()
