"""Exponentials on a CPU, MLX's own against what this library uses there: python -m benchmarks.exponentials

Both ways run turn and turn about in one process, with one BLAS thread, in processor time by default, which other work
disturbs less than wall time: functions, attention, a tower's pictures, prompts, the sample that reads, and a step's sampling.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vlm_batch.runtime import blas

blas.preload_openblas()  # before anything imports mlx.core

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.compare.shapes import SHAPES, build  # noqa: E402
from benchmarks.limits import picture_inputs  # noqa: E402
from vlm_batch import SamplingParams, VLMBatcher  # noqa: E402
from vlm_batch.adapters import by_numpy  # noqa: E402
from vlm_batch.adapters.hooks import running  # noqa: E402
from vlm_batch.engine.sampling import SamplingRow, sample  # noqa: E402
from vlm_batch.loading import adapt  # noqa: E402
from vlm_batch.records import Call, Encoded  # noqa: E402
from vlm_batch.runtime import exponentials  # noqa: E402

ROOT = Path(__file__).parents[1]
READER = ROOT / "fixtures" / "reader"
PAGE = ROOT / "fixtures" / "images" / "page_of_text.png"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
#: Rows and columns of the arrays that functions are measured on: the scores of a prompt of 1,000 tokens.
ROWS, COLUMNS = 4096, 1024
VOCABULARY = 151_936
NUMPYS = exponentials.is_numpys


class Bench:
    """Measures both ways, turn and turn about."""

    def __init__(self, clock: str, rounds: int) -> None:
        self._clock = CLOCKS[clock]
        self._rounds = rounds
        self.found: list[dict[str, Any]] = []

    def compare(
        self,
        name: str,
        call: Callable[[], Any],
        beside: Callable[[], Any] | None = None,
    ) -> None:
        """Time a call by MLX and by what is used here, and numpy ``beside``: the fastest of the rounds, in ms."""
        ways = {"mlx": (False, call), "here": (True, call)}
        if beside is not None:
            ways["numpy"] = (True, beside)
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(self._rounds):
            for way, (is_numpys, measured) in ways.items():
                exponentials.is_numpys = NUMPYS if is_numpys else lambda: False
                best[way] = min(best[way], self._seconds(measured))
        exponentials.is_numpys = NUMPYS
        row = {
            "what": name,
            **{way: round(1000 * seconds, 2) for way, seconds in best.items()},
        }
        row["ratio"] = round(best["here"] / best["mlx"], 3)
        self.found.append(row)
        print(
            f"{name:<52}{row['mlx']:>12}{row['here']:>12}{row.get('numpy', ''):>12}{row['ratio']:>9}",
            flush=True,
        )

    def _seconds(self, call: Callable[[], Any]) -> float:
        start = self._clock()
        made = call()
        if made is not None:
            mx.eval(made)
        return self._clock() - start


def functions(bench: Bench) -> None:
    """Functions of 4 million numbers, within an adapter's call."""
    numbers = mx.random.normal((ROWS, COLUMNS)) * 3
    mx.eval(numbers)
    own, out = np.array(numbers), np.empty((ROWS, COLUMNS), np.float32)

    def softmax() -> None:
        np.subtract(own, own.max(axis=-1, keepdims=True), out=out)
        np.exp(out, out=out)
        np.divide(out, out.sum(axis=-1, keepdims=True), out=out)

    beside: dict[str, Callable[[], Any]] = {
        "exp": lambda: np.exp(own, out=out) is None,
        "tanh": lambda: np.tanh(own, out=out) is None,
        "sin": lambda: np.sin(own, out=out) is None,
        "cos": lambda: np.cos(own, out=out) is None,
        "softmax": softmax,
    }
    for dtype in ("float32", "bfloat16"):
        array = numbers.astype(getattr(mx, dtype))
        mx.eval(array)
        calls: dict[str, Callable[[], Any]] = {
            "exp": partial(mx.exp, array),
            "softmax": partial(mx.softmax, array, axis=-1),
            "logsumexp": partial(mx.logsumexp, array, axis=-1),
            "sigmoid": partial(mx.sigmoid, array),
            "silu": partial(nn.silu, array),
            "gelu": partial(nn.gelu, array),
            "gelu_approx": partial(nn.gelu_approx, array),
            "gelu_fast_approx": partial(nn.gelu_fast_approx, array),
            "tanh": partial(mx.tanh, array),
            "erf": partial(mx.erf, array),
            "sin": partial(mx.sin, array),
            "cos": partial(mx.cos, array),
        }
        for name, call in calls.items():
            with running(Call()):
                call()  # compiled functions build their kernels at the first call
                bench.compare(
                    f"{name}, {ROWS} x {COLUMNS}, {dtype}",
                    call,
                    beside.get(name) if dtype == "float32" else None,
                )


def attention(bench: Bench) -> None:
    for length, mask in ((256, None), (1024, None), (3696, None), (1024, "causal")):
        parts = [mx.random.normal((1, 4, length, 64)) for _ in range(3)]
        mx.eval(parts)
        with running(Call()):
            bench.compare(
                f"attention, 4 heads, {length} positions, {mask or 'all'}",
                partial(
                    mx.fast.scaled_dot_product_attention, *parts, scale=0.125, mask=mask
                ),
            )


def shape_of_47m(bench: Bench) -> None:
    """Pictures of 256, 1,024 and 4,096 patches, and a prompt of 1,000 tokens."""
    shape = SHAPES["small"]
    model = build(shape)
    adapter = adapt(model)
    for side in (16, 32, 64):
        inputs = picture_inputs(shape, side)
        bench.compare(
            f"47 M shape: encode {side * side} patches",
            partial(_embeddings, adapter, inputs),
        )
    ids = mx.arange(1000)[None] % 1000 + 20
    embeds = adapter.token_table(ids)
    row = Encoded(ids, embeds)
    bench.compare(
        "47 M shape: prompt of 1,000 tokens",
        lambda: adapter.prefill([row], adapter.make_cache(), 0, 1000),
    )


def _embeddings(adapter: Any, inputs: dict[str, Any]) -> mx.array:
    embeds: mx.array = adapter.encode(inputs).inputs_embeds
    return embeds


def _sampled(logits: mx.array, rows: list[SamplingRow]) -> list[mx.array]:
    return sample(logits, rows).arrays()


def page_of_text(bench: Bench) -> None:
    with VLMBatcher(READER, caches=None) as batcher:

        def answer(tokens: int) -> None:
            batcher.submit(
                PAGE, "read the text", params=SamplingParams(max_tokens=tokens)
            ).result()

        answer(1)
        bench.compare("page_of_text: first token", lambda: answer(1))
        bench.compare("page_of_text: 64 tokens", lambda: answer(64))


def sampling(bench: Bench) -> None:
    logits = mx.random.normal((8, VOCABULARY)) * 3
    mx.eval(logits)
    kinds = {
        "greedy": SamplingParams(),
        "temperature 1": SamplingParams(temperature=1.0),
        "temperature 1, top_p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
        "greedy, log-probabilities": SamplingParams(logprobs=1),
    }
    for name, params in kinds.items():
        rows = [SamplingRow(params, seed=row, step=1) for row in range(8)]
        bench.compare(
            f"sampling of 8 x {VOCABULARY}: {name}", partial(_sampled, logits, rows)
        )


PARTS = {
    "functions": functions,
    "attention": attention,
    "shape": shape_of_47m,
    "page": page_of_text,
    "sampling": sampling,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--rounds", type=int, default=3, help="of which the fastest counts"
    )
    parser.add_argument("--clock", choices=list(CLOCKS), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of OpenBLAS")
    args = parser.parse_args()
    blas.limit_threads(args.threads)
    print(
        f"numpy is used here: {NUMPYS()}; {platform.machine()}, mlx {version('mlx')}, numpy {np.__version__}"
    )
    print(
        f"{f'ms, {args.clock} time':<52}{'MLX':>12}{'here':>12}{'numpy':>12}{'ratio':>9}"
    )
    by_numpy.hook_exponentials(nn.Module(), ())
    bench = Bench(args.clock, args.rounds)
    for part in args.parts:
        PARTS[part](bench)
    print(
        json.dumps(
            {
                "machine": platform.machine(),
                "mlx": version("mlx"),
                "numpy": np.__version__,
                "rows": bench.found,
            }
        )
    )


if __name__ == "__main__":
    main()
