"""The engine's own Python in a decode step: python -m benchmarks.own_time [--rows N] [--profile]

The model gives constant logits, so what is left is the engine and the choice of tokens. Figures are microseconds of the
engine's thread in the median step of all rows; ``--profile`` prints where they go. The last line is JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Mapping

from vlm_batch.runtime.blas import preload_openblas

preload_openblas()

import mlx.core as mx  # noqa: E402

from benchmarks import caches  # noqa: E402
from vlm_batch.arrays import as_mlx  # noqa: E402
from vlm_batch.engine.generator import BatchGenerator  # noqa: E402
from vlm_batch.engine.row import Prompt, new_row  # noqa: E402
from vlm_batch.policy import policy_of  # noqa: E402
from vlm_batch.records import Call, DecodeStep  # noqa: E402
from vlm_batch.types import SamplingParams  # noqa: E402

#: What rows ask for.
KINDS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8),
    "logprobs": SamplingParams(logprobs=4),
    "penalty": SamplingParams(repetition_penalty=1.1),
}
#: Steps before those that count.
FIRST = 32


def decoding(rows: int, tokens: int, params: SamplingParams) -> BatchGenerator:
    """An engine with ``rows`` that decode, with a model that gives constant logits."""
    adapter = caches.plain_model(2)
    logits = mx.random.normal((rows, caches.VOCABULARY))
    mx.eval(logits)

    def decode(step: DecodeStep, call: Call) -> mx.array:
        return logits[: step.tokens.shape[0]]

    adapter.decode = decode  # type: ignore[method-assign,assignment]
    generator = BatchGenerator(adapter, policy=policy_of({"max_rows": rows}))
    for index in range(rows):
        inputs = as_mlx({"input_ids": caches.np.full((1, 32), 5 + index)})
        own = SamplingParams(**vars(params) | {"max_tokens": tokens, "seed": index})
        generator.rows.add(new_row(str(index), Prompt(inputs=inputs), own))
    while len(generator.rows.batch) < rows:
        generator.step()
    for _ in range(FIRST):
        generator.step()
    return generator


def step_seconds(generator: BatchGenerator, steps: int) -> list[float]:
    found: list[float] = []
    for _ in range(steps):
        begin = time.thread_time()
        generator.step()
        found.append(time.thread_time() - begin)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=[*KINDS])
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    found: dict[str, float] = {}
    for kind in args.kinds:
        medians: list[float] = []
        for _ in range(args.rounds):
            generator = decoding(args.rows, FIRST + args.steps + 16, KINDS[kind])
            if args.profile:
                profile = cProfile.Profile()
                profile.runcall(step_seconds, generator, args.steps)
                pstats.Stats(profile).sort_stats("tottime").print_stats(30)
                break
            seconds = step_seconds(generator, args.steps)
            medians.append(statistics.median(seconds))
        if medians:
            found[kind] = round(1e6 * min(medians), 1)
            print(f"{kind}: {found[kind]} us a step of {args.rows} rows")
    print(json.dumps({"rows": args.rows, "us": found}))


if __name__ == "__main__":
    main()
