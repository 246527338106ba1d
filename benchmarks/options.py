"""What options cost beside one answer token: python -m benchmarks.options [--questions 500] [--rounds 5]

Every question has a picture of its own. A round answers all questions with one token, then scores four options of each
kind, in an order that changes: of one token, of three, of three that differ in the last one alone, and of eight. Ratios
are within a round, of seconds and of the process's own seconds of computing (``cpu``), which other programs disturb less:
medians, with the least and the most. ``--shape`` takes a model of random weights (``benchmarks.compare``), whose options
are random tokens. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from benchmarks.compare.shapes import SHAPES, Shape
from benchmarks.compare.workloads import SEED, question
from vlm_batch import Request, SamplingParams, VLMBatcher
from vlm_batch.assets import default_checkpoint
from vlm_batch.types import Option

PROMPT = "describe the image"
ONE = "one answer token"
#: Pixels of a picture's side.
SIZE = 224
TEXTS: Mapping[str, Sequence[Option]] = {
    "of one token": ("a", "b", "c", "d"),
    "of three": ("a red circle", "a blue square", "a green circle", "a red square"),
    "of three, unlike in the last": (
        "a red circle",
        "a red square",
        "a red triangle",
        "a red picture",
    ),
    "of eight": (
        "a red circle and two blue squares below",
        "a blue square and one red circle below",
        "a green circle and two red squares above",
        "two red squares and a green circle above",
    ),
}

#: Options by name, and questions.
Asked = tuple[Mapping[str, Sequence[Option]], list[dict[str, Any]]]


def about_pictures(count: int) -> Asked:
    """Questions to the embedded checkpoint, or another that is given."""
    random = np.random.default_rng(0)
    pictures = random.integers(0, 256, (count, SIZE, SIZE, 3), dtype=np.uint8)
    return TEXTS, [{"images": picture, "prompt": PROMPT} for picture in pictures]


def of_shape(shape: Shape, count: int) -> Asked:
    """Questions of random tokens, with pictures as a processor makes them."""
    random = np.random.RandomState(SEED)

    def options(length: int, common: int = 0) -> list[tuple[int, ...]]:
        drawn = random.randint(16, shape.vocabulary - 8, (4, length))
        drawn[:, :common] = drawn[0, :common]
        return [tuple(map(int, one)) for one in drawn]

    kinds = zip(TEXTS, ((1,), (3,), (3, 2), (8,)), strict=True)
    found = {name: options(*how) for name, how in kinds}
    return found, [{"inputs": question(shape, random)} for _ in range(count)]


def opened(given: argparse.Namespace) -> AbstractContextManager[VLMBatcher]:
    if given.shape is None:
        return VLMBatcher(given.model, caches=None, reproducible=given.reproducible)
    # they load MLX
    from benchmarks.compare.engines import Processor
    from benchmarks.compare.shapes import build

    class Speaking(Processor):
        def decode(self, tokens: Sequence[int], **kwargs: Any) -> str:
            return "".join(chr(ord("a") + token % 26) for token in tokens)

    model = build(SHAPES[given.shape])
    return VLMBatcher(model, Speaking(), caches=None, reproducible=given.reproducible)


def summary(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the ratio to ``base``, value by value: the median, the least, the most."""
    ratios = [one / other for one, other in zip(values, base, strict=True)]
    return [round(of(ratios), 2) for of in (statistics.median, min, max)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(default_checkpoint()))
    parser.add_argument("--shape", choices=list(SHAPES), help="in the model's place")
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reproducible", action="store_true")
    given = parser.parse_args()
    if given.shape is None:
        options, questions = about_pictures(given.questions)
    else:
        options, questions = of_shape(SHAPES[given.shape], given.questions)
    one_token = SamplingParams(max_tokens=1)
    kinds = {ONE: [Request(**one, params=one_token) for one in questions]}
    for name, those in options.items():
        kinds[name] = [Request(**one, options=those) for one in questions]
    wall: dict[str, list[float]] = {name: [] for name in kinds}
    cpu: dict[str, list[float]] = {name: [] for name in kinds}
    lengths: dict[str, list[int]] = {}
    with opened(given) as batcher:
        for number in range(given.rounds + 1):
            names = list(kinds)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                begin, computing = time.perf_counter(), time.process_time()
                results = batcher.generate(kinds[name], raise_on_error=True)
                if number:  # the first round warms up
                    wall[name].append(time.perf_counter() - begin)
                    cpu[name].append(time.process_time() - computing)
                lengths[name] = [len(one.token_ids) for one in results[0].options]
    found: dict[str, Any] = {"shape": given.shape, "questions": len(questions)}
    for name in kinds:
        found[name] = {
            "seconds": round(statistics.median(wall[name]), 2),
            "ratio": summary(wall[name], wall[ONE]),
            "cpu": summary(cpu[name], cpu[ONE]),
            "tokens": lengths[name],
        }
        print(f"{name}: {found[name]}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
