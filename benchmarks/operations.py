"""What a tower, a prompt and a step compute, product or not, and how far each is from this machine's own rates.

    python -m benchmarks.operations [--shapes small gemma3-small ...]

MLX traces each call. A product's floor is its flops over the measured rate of matrix products, or the bytes of its second
operand (of experts, those that are asked) over the rate at which memory is read, where that takes longer. That of
exponentials (softmax,
sigmoid, erf, sines, powers and others alike) is their numbers over the rate of numpy's or MLX's exp, whichever is faster.
That of everything else (sums, norms, rotations, masks, copies, gathers) is its numbers over the rate of an addition. Views are
free.
One thread, processor time by default. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from vlm_batch.runtime import blas

blas.preload_openblas()  # before anything imports mlx.core

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.compare.shapes import SHAPES, Shape, build  # noqa: E402
from benchmarks.limits import picture_inputs  # noqa: E402
from vlm_batch import SamplingParams  # noqa: E402
from vlm_batch.adapters import experts  # noqa: E402
from vlm_batch.adapters.hooks import running  # noqa: E402
from vlm_batch.caches import Placement  # noqa: E402
from vlm_batch.engine.batch import DecodeBatch  # noqa: E402
from vlm_batch.engine.row import Prompt, new_row  # noqa: E402
from vlm_batch.engine.sampling import SamplingRow, sample  # noqa: E402
from vlm_batch.engine.shapes import FreeShapes  # noqa: E402
from vlm_batch.loading import adapt  # noqa: E402
from vlm_batch.policy import Policy  # noqa: E402
from vlm_batch.records import Call, DecodeStep  # noqa: E402

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
#: Rows of a step, and positions in the caches of each.
STEP_ROWS, CONTEXT = 8, 500
#: A traced array: shape and dtype.
Traced = tuple[tuple[int, ...], Any]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Rates:
    """Seconds of a flop, a byte read, an exponential, and a number of anything else."""

    flop: float
    byte: float
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
        large, vector = mx.random.normal((16384, 4096)), mx.random.normal((1, 4096))
        mx.eval(large, vector)
        reads = (
            lambda: vector @ large.T,
            lambda: large.sum(axis=-1),
            lambda: large.max(),
        )
        return cls(
            seconds(lambda: a @ b) / (2 * 1024**3),
            min(seconds(read) for read in reads) / large.nbytes,
            exponential / a.size,
            seconds(lambda: a + b) / a.size,
        )

    def products(self, counts: Sequence[tuple[int, int]]) -> float:
        """Seconds of products (flops, bytes)."""
        return sum(max(flops * self.flop, read * self.byte) for flops, read in counts)


@dataclass
class Counts:
    """What a call computes: (flops, bytes of the second operand) of each product, exponentials, and other numbers."""

    products: list[tuple[int, int]] = field(default_factory=list)
    exponentials: int = 0
    others: int = 0

    def add(self, name: str, given: list[Traced], made: list[Traced]) -> None:
        """Add a primitive of these operands and results."""
        if name in PRODUCTS:
            self.products.append((_flops(name, given, made), _bytes_read(given, made)))
            return
        numbers = max(math.prod(shape) for shape, _ in [*given, *made])
        if name in EXPONENTIALS:
            self.exponentials += numbers
        else:
            self.others += numbers


def _flops(name: str, given: list[Traced], made: list[Traced]) -> int:
    multiplied = given[1][0][1:] if name == "Convolution" else given[0][0][-1:]
    return 2 * math.prod(made[0][0]) * math.prod(multiplied)


def _bytes_read(given: list[Traced], made: list[Traced]) -> int:
    """Bytes of a product's second operand; of stacked ones, of as many as it makes results of at most."""
    shape, dtype = given[1]
    stacked = math.prod(shape[:-2])
    asked = math.prod(made[0][0][:-2])
    return math.prod(shape[-2:]) * min(stacked, asked) * int(dtype.size)


def counted(call: Callable[[mx.array], Any], array: mx.array) -> Counts:
    """Count what a call of one array computes."""
    found = Counts()

    def note(what: dict[str, Any]) -> None:
        if what["type"] != "primitive" or what["name"] in VIEWS:
            return
        sides = {
            side: [(shape, dtype) for _, shape, dtype in what[side]]
            for side in ("inputs", "outputs")
        }
        found.add(what["name"], sides["inputs"], sides["outputs"])

    module = vars(mx)
    own = {name: module[name] for name in ("contiguous", "eval")}

    def evaluate(*arrays: Any) -> None:
        """Leave out what a tower of mlx-vlm's evaluates on its way; a trace has no numbers."""
        asks = sys._getframe(1).f_globals["__name__"]
        if not asks.startswith("mlx_vlm."):
            own["eval"](*arrays)

    # contiguous has no form to be exported in
    module.update(contiguous=lambda array, *how: array, eval=evaluate)
    apart = experts.multiplies_apart
    # experts' rows are read back to be cut; uncut they have as many flops
    vars(experts)["multiplies_apart"] = lambda *rows: False
    try:
        mx.export_function(note, call, array)
    finally:
        module.update(own)
        vars(experts)["multiplies_apart"] = apart
    return found


class Table:
    """Rows of floors and measured times, in ms."""

    def __init__(self, clock: str, rounds: int) -> None:
        self._clock, self._rounds = CLOCKS[clock], rounds
        self.rates = Rates.measured(self._seconds)
        self.rows: list[dict[str, Any]] = []
        rates = self.rates
        print(
            f"{1e-9 / rates.flop:.0f} GFLOP/s, {1e-9 / rates.byte:.0f} GB/s,"
            f" an exponential {1e9 * rates.exponential:.2f} ns,"
            f" another number {1e9 * rates.other:.2f} ns"
        )
        heads = ("products", "exponentials", "others", "floor", "measured", "of it")
        print(f"{'ms':<44}" + "".join(f"{head:>14}" for head in heads))

    def add(
        self,
        name: str,
        call: Callable[[mx.array], Any],
        array: mx.array,
        traced: Callable[[mx.array], Any] | None = None,
    ) -> None:
        """Add a row.

        Args:
            call: of ``array``; measured.
            traced: the same call where it changes what it holds, on a copy that only the count uses.
        """
        counts = counted(traced or call, array)
        parts = {
            "products": 1000 * self.rates.products(counts.products),
            "exponentials": 1000 * counts.exponentials * self.rates.exponential,
            "others": 1000 * counts.others * self.rates.other,
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

    tokens = mx.full((STEP_ROWS, 1), 5, dtype=mx.int32)
    table.add(
        f"{shape.name}: step of {STEP_ROWS} rows at {CONTEXT}",
        step_of(adapter, row),
        tokens,
        traced=step_of(adapter, row),
    )


def step_of(adapter: Any, row: Any) -> Callable[[mx.array], mx.array]:
    """Return a decode step of equal rows, each with the first ``CONTEXT`` positions of a prompt in its caches."""
    shapes = FreeShapes(Placement.for_device(), Policy())
    batch = DecodeBatch(shapes, STEP_ROWS)
    for place in range(STEP_ROWS):
        cache = adapter.make_cache()
        mx.eval(adapter.prefill([row], cache, 0, CONTEXT))
        batch.join(new_row(str(place), Prompt(), SamplingParams()), cache)
    mx.eval([layer.arrays() for layer in batch.layers])
    positions = mx.full((STEP_ROWS,), CONTEXT, dtype=mx.int32)
    extras = [row.decode] * STEP_ROWS

    def step(tokens: mx.array) -> mx.array:
        logits: mx.array = adapter.decode(
            DecodeStep(tokens, positions, batch.layers, extras)
        )
        return logits

    return step


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
    own = [
        "small",
        "wide",
        "gemma3-small",
        "qwen3.5-small",
        "llava-small",
        "experts-small",
        "paligemma-small",
    ]
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
