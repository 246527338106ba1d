"""What options cost beside one answer token: python -m benchmarks.options [--questions 500] [--rounds 5]

Every question has a picture of its own. A round answers all questions with one token, scores four options of one token
each, and scores four of several tokens, one after another in an order that changes. Medians over the rounds, with the
least and the most. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from vlm_batch import Request, VLMBatcher
from vlm_batch.assets import default_checkpoint

PROMPT = "describe the image"
#: Four options each: of one token, and of three or four.
SHORT = ("a", "b", "c", "d")
LONG = ("a red circle", "a blue square", "a green circle", "a red square")


def requests(pictures: Sequence[np.ndarray], **asked: Any) -> list[Request]:
    return [
        Request(images=picture, prompt=PROMPT, **asked)  # type: ignore[arg-type]
        for picture in pictures
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(default_checkpoint()))
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--size", type=int, default=224, help="pixels of a side")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    random = np.random.default_rng(0)
    shape = (given.questions, given.size, given.size, 3)
    pictures = list(random.integers(0, 256, shape, dtype=np.uint8))
    kinds = {
        "one answer token": requests(pictures, params={"max_tokens": 1}),
        "four options of one token": requests(pictures, options=SHORT),
        "four options of several tokens": requests(pictures, options=LONG),
    }
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    with VLMBatcher(given.model, caches=None) as batcher:
        for number in range(given.rounds + 1):
            names = list(kinds)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                begin = time.perf_counter()
                batcher.generate(kinds[name], raise_on_error=True)
                if number:  # the first round warms up
                    taken[name].append(time.perf_counter() - begin)
        lengths = [
            [len(one.token_ids) for one in batcher.score(kinds[name][0], options)]
            for name, options in zip(list(kinds)[1:], (SHORT, LONG), strict=True)
        ]
    base = taken["one answer token"]
    found: dict[str, Any] = {"tokens": lengths}
    for name, seconds in taken.items():
        ratios = [one / other for one, other in zip(seconds, base, strict=True)]
        found[name] = {
            "seconds": round(statistics.median(seconds), 2),
            "ratio": [round(of(ratios), 3) for of in (statistics.median, min, max)],
        }
        print(f"{name}: {found[name]}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
