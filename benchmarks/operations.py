"""What a tower, a prompt and a step compute, product or not, and how far each is from this machine's own rates.

    python -m benchmarks.operations [--shapes small gemma3-small ...]

MLX traces each call. A product's floor is its flops over the measured rate of matrix products. That of exponentials (softmax,
sigmoid, erf, sines, powers and others alike) is their numbers over the rate of numpy's or MLX's exp, whichever is faster.
That of everything else (sums, norms, rotations, masks, copies, gathers) is its numbers over the rate of an addition. Views are
free.
One thread, processor time by default. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vlm_batch.runtime import blas

blas.preload_openblas()  # before anything imports mlx.core

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.compare.shapes import SHAPES, Shape, build  # noqa: E402
from benchmarks.limits import picture_inputs  # noqa: E402
from vlm_batch import SamplingParams  # noqa: E402
from vlm_batch.adapters.hooks import running  # noqa: E402
from vlm_batch.engine.sampling import SamplingRow, sample  # noqa: E402
from vlm_batch.loading import adapt  # noqa: E402
from vlm_batch.records import Call  # noqa: E402

PRODUCTS = frozenset(
    ["Matmul", "AddMM", "QuantizedMatmul", "GatherMM", "GatherQMM", "Convolution"]
)
EXPONENTIALS = frozenset(
    [
        "Softmax",
        "LogSumExp",
        "LogAddExp",
        "Exp",
        "Expm1",
        "Log",
        "Log1p",
        "Sigmoid",
        "Tanh",
        "Erf",
        "ErfInv",
        "Sin",
        "Cos",
        "Power",
        "ScaledDotProductAttention",
        "RoPE",
    ]
)
VIEWS = frozenset(
    [
        "Broadcast",
        "BroadcastAxes",
        "Transpose",
        "Reshape",
        "Squeeze",
        "ExpandDims",
        "Slice",
        "Split",
        "Flatten",
        "Unflatten",
        "AsStrided",
        "StopGradient",
        "View",
    ]
)
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Rates:
    """Seconds of a flop, an exponential, and a number of anything else."""

    flop: float
    exponential: float
    other: float

    @classmethod
    def measured(cls, seconds: Callable[[Callable[[], Any]], float]) -> Rates:
        a, b = mx.random.normal((1024, 1024)), mx.random.normal((1024, 1024))
        mx.eval(a, b)
        own, out = np.array(a), np.empty((1024, 1024), np.float32)
        exponential = min(
            seconds(lambda: mx.exp(a)), seconds(lambda: np.exp(own, out=out) is None)
        )
        return cls(
            seconds(lambda: a @ b) / (2 * 1024**3),
            exponential / a.size,
            seconds(lambda: a + b) / a.size,
        )


def counted(call: Callable[[mx.array], Any], array: mx.array) -> Counter[str]:
    """Count flops, exponentials and other numbers of a call of one array."""
    found: Counter[str] = Counter()

    def note(what: dict[str, Any]) -> None:
        if what["type"] != "primitive" or what["name"] in VIEWS:
            return
        given, made = (
            [shape for _, shape, _ in what[side]] for side in ("inputs", "outputs")
        )
        numbers = max(map(math.prod, [*given, *made]))
        if what["name"] == "Convolution":
            found["flops"] += 2 * math.prod(made[0]) * math.prod(given[1][1:])
        elif what["name"] in PRODUCTS:
            found["flops"] += 2 * math.prod(made[0]) * given[0][-1]
        else:
            found["exponentials" if what["name"] in EXPONENTIALS else "others"] += (
                numbers
            )

    module, contiguous = vars(mx), mx.contiguous
    # the one that has no form to be exported in
    module["contiguous"] = lambda array, *how: array
    try:
        mx.export_function(note, call, array)
    finally:
        module["contiguous"] = contiguous
    return found


class Table:
    """Rows of floors and measured times, in ms."""

    def __init__(self, clock: str, rounds: int) -> None:
        self._clock, self._rounds = CLOCKS[clock], rounds
        self.rates = Rates.measured(self._seconds)
        self.rows: list[dict[str, Any]] = []
        print(
            f"{1e-9 / self.rates.flop:.0f} GFLOP/s, an exponential {1e9 * self.rates.exponential:.2f} ns, "
            f"another number {1e9 * self.rates.other:.2f} ns"
        )
        heads = ("products", "exponentials", "others", "floor", "measured", "of it")
        print(f"{'ms':<44}" + "".join(f"{head:>14}" for head in heads))

    def add(self, name: str, call: Callable[[mx.array], Any], array: mx.array) -> None:
        counts = counted(call, array)
        parts = {
            "products": 1000 * counts["flops"] * self.rates.flop,
            "exponentials": 1000 * counts["exponentials"] * self.rates.exponential,
            "others": 1000 * counts["others"] * self.rates.other,
        }
        parts["floor"] = sum(parts.values())
        parts["measured"] = 1000 * self._seconds(lambda: call(array))
        times = parts["measured"] / parts["floor"]
        self.rows.append(
            {
                "what": name,
                **{part: round(ms, 2) for part, ms in parts.items()},
                "times": round(times, 2),
            }
        )
        print(
            f"{name:<44}"
            + "".join(f"{ms:>14.2f}" for ms in parts.values())
            + f"{times:>14.2f}",
            flush=True,
        )

    def _seconds(self, call: Callable[[], Any]) -> float:
        """Seconds of a call: the fastest of the rounds, after one."""
        found = []
        for _ in range(self._rounds + 1):
            start = self._clock()
            made = call()
            if isinstance(made, (mx.array, list)):
                mx.eval(made)
            found.append(self._clock() - start)
        return min(found[1:])


def of_shape(table: Table, shape: Shape) -> None:
    adapter = adapt(build(shape))
    for side in (16, 32, 64) if shape.picture_tokens is None else (0,):
        inputs = picture_inputs(shape, side) if side else _whole_picture(shape)
        pixels = inputs["pixel_values"]
        name = f"{shape.name}: {f'{side * side} patches' if side else 'picture'}"
        table.add(name, partial(_embeddings, adapter, inputs), pixels)
    row = adapter.encode({"input_ids": mx.arange(1000)[None] % 1000 + 20})
    mx.eval(row.inputs_embeds)

    def prefill(embeds: mx.array) -> mx.array:
        return adapter.prefill(
            [replace(row, inputs_embeds=embeds)], adapter.make_cache(), 0, 1000
        )

    table.add(f"{shape.name}: prompt of 1,000", prefill, row.inputs_embeds)


def _embeddings(adapter: Any, inputs: dict[str, Any], pixels: mx.array) -> mx.array:
    embeds: mx.array = adapter.encode({**inputs, "pixel_values": pixels}).inputs_embeds
    return embeds


def _whole_picture(shape: Shape) -> dict[str, Any]:
    last = shape.vocabulary
    ids = mx.array([[last + mark for mark in _marks(shape)]])
    made = shape.picture(np.random.RandomState(0), (0, 0))
    return {"input_ids": ids, **{name: mx.array(value) for name, value in made.items()}}


def _marks(shape: Shape) -> list[int]:
    image = next(
        mark for name, mark in shape.markers.items() if name.startswith("image_token")
    )
    return [image] * shape.count_tokens((0, 0))


def of_sampling(table: Table, vocabulary: int) -> None:
    """What a step of 8 rows does with its logits."""
    logits = mx.random.normal((8, vocabulary)) * 3
    mx.eval(logits)
    for name, params in (
        ("greedy", SamplingParams()),
        ("temperature 1", SamplingParams(temperature=1.0)),
        ("temperature 1, top_k 50", SamplingParams(temperature=1.0, top_k=50)),
        ("log-probabilities", SamplingParams(logprobs=1)),
    ):
        rows = [SamplingRow(params, seed=row, step=1) for row in range(8)]
        table.add(f"8 x {vocabulary}: {name}", partial(_sampled, rows), logits)


def _sampled(rows: list[SamplingRow], logits: mx.array) -> list[mx.array]:
    return sample(logits, rows).arrays()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    own = ["small", "wide", "gemma3-small", "qwen3.5-small", "llava-small"]
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=own)
    parser.add_argument(
        "--rounds", type=int, default=3, help="of which the fastest counts"
    )
    parser.add_argument("--clock", choices=list(CLOCKS), default="cpu")
    args = parser.parse_args()
    blas.limit_threads(1)
    with running(Call()):
        table = Table(args.clock, args.rounds)
    for name in args.shapes:
        of_shape(table, SHAPES[name])
    of_sampling(table, 151_936)
    print(json.dumps({"rates": vars(table.rates), "rows": table.rows}))


if __name__ == "__main__":
    main()
