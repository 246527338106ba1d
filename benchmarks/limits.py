"""How far a decode step is from what the device can do: python -m benchmarks.limits [--shape 3b]

The floor of a step is the larger of two times: its bytes (weights and KV) over the measured read bandwidth, and its flops
over the measured rate of matrix products. Beside it stand a bare forward loop (mlx-vlm's model with plain caches of equal
length, greedy, one step ahead), which is what MLX's own kernels take, and this library's engine on rows of the same length.
Then how a step grows with context, and what encoding a picture costs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compare.measure import WorkClock
from benchmarks.compare.recall import Contexts, RecallingAdapter
from benchmarks.compare.shapes import (
    IMAGE,
    SHAPES,
    VISION_END,
    VISION_START,
    Shape,
    build,
    parameters,
)
from vlm_batch import SamplingParams
from vlm_batch.runtime import blas

STEPS = 24


def best_time(call: Callable[[], Any], seconds: float = 0.5) -> float:
    """Seconds of one call: the fastest of as many as fit, three at least."""
    import mlx.core as mx

    mx.eval(call())
    found: list[float] = []
    begin = time.perf_counter()
    while len(found) < 3 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        mx.eval(call())
        found.append(time.perf_counter() - start)
    return min(found)


def read_bandwidth(dtype: Any, megabytes: int) -> float:
    """Bytes a second at which a device reads: the best of a matrix-vector product and two reductions of a large array."""
    import mlx.core as mx

    width = 4096
    matrix = mx.random.normal(
        (megabytes * 2**20 // (width * dtype.size), width)
    ).astype(dtype)
    vector = mx.random.normal((1, width)).astype(dtype)
    mx.eval(matrix, vector)
    calls = (
        lambda: vector @ matrix.T,
        lambda: matrix.sum(axis=-1),
        lambda: matrix.max(),
    )
    return matrix.nbytes / min(best_time(call) for call in calls)


def product_rate(dtype: Any, size: int) -> float:
    """Flops a second of a square matrix product."""
    import mlx.core as mx

    a = mx.random.normal((size, size)).astype(dtype)
    b = mx.random.normal((size, size)).astype(dtype)
    mx.eval(a, b)
    return 2 * size**3 / best_time(lambda: a @ b)


def weights_of_a_step(model: Any, shape: Shape) -> tuple[int, int]:
    """(bytes, values) of the weights that a decode step reads: the layers and the head, not the table of embeddings."""
    tied = bool(shape.text["tie_word_embeddings"])
    read = [
        value
        for path, value in parameters(model.language_model)
        if tied or "embed_tokens" not in path
    ]
    return sum(value.nbytes for value in read), sum(value.size for value in read)


def kv_bytes(shape: Shape, tokens: int, item: int) -> int:
    """Keys and values of ``tokens`` positions, all layers."""
    text = shape.text
    head = text["hidden_size"] // text["num_attention_heads"]
    return int(
        2
        * text["num_hidden_layers"]
        * text["num_key_value_heads"]
        * head
        * tokens
        * item
    )


class RandomContexts(Contexts):
    """Stands for computed prompts of any length: the time of a step does not depend on what its keys are."""

    def __init__(self, shape: Shape, dtype: Any, longest: int) -> None:
        import mlx.core as mx

        text = shape.text
        size = (
            1,
            text["num_key_value_heads"],
            longest,
            text["hidden_size"] // text["num_attention_heads"],
        )
        self.layers = [
            (mx.random.normal(size).astype(dtype), mx.random.normal(size).astype(dtype))
            for _ in range(text["num_hidden_layers"])
        ]
        self.logits = mx.zeros((1, shape.vocabulary), dtype=dtype)
        mx.eval(self.layers, self.logits)

    def recall(self, first: int, cache: Sequence[Any], start: int, end: int) -> Any:
        for layer, (keys, values) in zip(cache, self.layers, strict=True):
            layer.update_and_fetch(keys[:, :, start:end], values[:, :, start:end])
        return self.logits


def bare_step(model: Any, contexts: RandomContexts, rows: int, context: int) -> float:
    """Seconds of a step of the bare loop."""
    import mlx.core as mx
    from mlx_vlm.models.cache import make_prompt_cache

    language = model.language_model
    cache = make_prompt_cache(language)
    for layer, (keys, values) in zip(cache, contexts.layers, strict=True):
        layer.update_and_fetch(
            mx.repeat(keys[:, :, :context], rows, axis=0),
            mx.repeat(values[:, :, :context], rows, axis=0),
        )
    mx.eval([layer.state for layer in cache])

    def launch(tokens: Any, position: int) -> Any:
        positions = mx.full((3, rows, 1), position, dtype=mx.int32)
        logits = language(tokens[:, None], cache=cache, position_ids=positions).logits[
            :, -1
        ]
        following = mx.argmax(logits, axis=-1)
        mx.async_eval(following)
        return following

    tokens = launch(mx.arange(rows) + 20, context)
    times = [time.perf_counter()]
    for step in range(1, STEPS):
        ahead = launch(tokens, context + step)
        tokens.tolist()
        times.append(time.perf_counter())
        tokens = ahead
    mx.eval(tokens)
    return _median_gap(times)


def engine_step(model: Any, contexts: RandomContexts, rows: int, context: int) -> float:
    """Seconds of a step of this library's engine, all rows live."""
    import mlx.core as mx

    from vlm_batch.engine.generator import BatchGenerator
    from vlm_batch.loading import adapt
    from vlm_batch.policy import policy_of

    tokens = rows * context
    policy = policy_of(
        {"max_rows": rows, "prefill_budget": tokens, "idle_budget": tokens}
    )
    adapter: Any = RecallingAdapter(adapt(model), contexts)
    generator = BatchGenerator(adapter, policy=policy)
    for row in range(rows):
        ids = mx.full((1, context), 20 + row, dtype=mx.int32)
        generator.insert(
            str(row),
            {"input_ids": ids},
            SamplingParams(max_tokens=STEPS + 2 * rows, ignore_eos=True),
        )
    times: list[float] = []
    while len(times) < STEPS:
        events = generator.step()
        if sum(event.token is not None for event in events) == rows:
            times.append(time.perf_counter())
    generator.reset()
    return _median_gap(times)


def _median_gap(times: Sequence[float]) -> float:
    gaps = [later - sooner for sooner, later in pairwise(times)]
    return statistics.median(gaps[2:])


def encode_seconds(model: Any, shape: Shape, side: int, pictures: int) -> float:
    """Seconds to encode ``pictures`` pictures of ``side`` patches square, in one request."""
    from vlm_batch.loading import adapt

    adapter, inputs = adapt(model), picture_inputs(shape, side, pictures)
    return best_time(lambda: adapter.encode(inputs).inputs_embeds)


def picture_inputs(shape: Shape, side: int, pictures: int = 1) -> dict[str, Any]:
    """What a processor makes of a request with ``pictures`` pictures of ``side`` patches square."""
    import mlx.core as mx

    last = shape.vocabulary
    one = [last + VISION_START, *[last + IMAGE] * (side * side // 4), last + VISION_END]
    inputs = {
        "input_ids": mx.array([one * pictures]),
        "pixel_values": mx.random.normal((pictures * side * side, shape.patch_length)),
        "image_grid_thw": mx.array([[1, side, side]] * pictures),
    }
    mx.eval(inputs["pixel_values"])
    return inputs


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All measurements; what the JSON line says."""
    import mlx.core as mx

    shape = SHAPES[args.shape]
    dtype = getattr(mx, shape.dtype)
    is_gpu = mx.default_device().type == mx.DeviceType.gpu
    model = build(shape)
    bandwidth = read_bandwidth(dtype, 2048 if is_gpu else 256)
    rate = product_rate(dtype, 8192 if is_gpu else 1024)
    weight_bytes, weight_values = weights_of_a_step(model, shape)
    console.print(
        f"reads {bandwidth / 1e9:.0f} GB/s, multiplies {rate / 1e9:.0f} GFLOP/s in {shape.dtype}; "
        f"a step reads {weight_bytes / 1e6:.0f} MB of weights"
    )
    contexts = RandomContexts(shape, dtype, max([*args.contexts, args.context]))

    def point(rows: int, context: int) -> dict[str, float]:
        step_bytes = weight_bytes + kv_bytes(shape, rows * context, dtype.size)
        head = shape.text["hidden_size"] * shape.text["num_hidden_layers"]
        flops = rows * (2 * weight_values + 4 * context * head)
        floor = max(step_bytes / bandwidth, flops / rate)
        found = {"rows": rows, "context": context, "floor_ms": 1000 * floor}
        found["bytes_ms"], found["flops_ms"] = (
            1000 * step_bytes / bandwidth,
            1000 * flops / rate,
        )
        bare, engine = [], []
        # turn and turn about, so that a busy machine is busy for both
        for _ in range(args.rounds):
            bare.append(bare_step(model, contexts, rows, context))
            engine.append(engine_step(model, contexts, rows, context))
        found["bare_ms"], found["engine_ms"] = 1000 * min(bare), 1000 * min(engine)
        mx.clear_cache()
        return found

    by_rows = [point(rows, args.context) for rows in args.rows]
    by_context = [point(8, context) for context in args.contexts]
    for title, points in (
        (f"a decode step at {args.context} tokens of context", by_rows),
        ("a decode step of 8 rows", by_context),
    ):
        _show(console, title, points)
    sides = shape.scale.image_patches
    pictures = [
        {
            "pixels": side * 14,
            "tokens": side * side // 4,
            "pictures": n,
            "ms": 1000 * encode_seconds(model, shape, side, n),
        }
        for side in (sides[0], sides[len(sides) // 2], sides[-1])
        for n in (1, 4)
    ]
    table = Table(title="encoding pictures, in one request", title_justify="left")
    for heading in ("pixels", "tokens each", "pictures", "ms", "ms each"):
        table.add_column(heading, justify="right")
    for found in pictures:
        each = found["ms"] / found["pictures"]
        table.add_row(
            f"{found['pixels']} x {found['pixels']}",
            str(found["tokens"]),
            str(found["pictures"]),
            f"{found['ms']:.1f}",
            f"{each:.1f}",
        )
    console.print(table)
    return {
        "shape": shape.name,
        "device": str(mx.default_device()),
        "mlx": version("mlx"),
        "gb_per_s": bandwidth / 1e9,
        "gflops": rate / 1e9,
        "weight_mb": weight_bytes / 1e6,
        "by_rows": by_rows,
        "by_context": by_context,
        "pictures": pictures,
    }


def _show(console: Console, title: str, points: Sequence[dict[str, float]]) -> None:
    table = Table(title=title, title_justify="left")
    measures = (
        "bytes ms",
        "flops ms",
        "floor ms",
        "bare loop ms",
        "engine ms",
        "engine/bare",
        "of the floor",
    )
    for heading in ("rows", "context", *measures):
        table.add_column(heading, justify="right")
    for found in points:
        names = ("bytes_ms", "flops_ms", "floor_ms", "bare_ms", "engine_ms")
        table.add_row(
            str(found["rows"]),
            str(found["context"]),
            *[f"{found[name]:.2f}" for name in names],
            f"{found['engine_ms'] / found['bare_ms']:.2f}",
            f"{100 * found['floor_ms'] / found['engine_ms']:.0f} %",
        )
    console.print(table)


def draw(path: Path, result: dict[str, Any]) -> bool:
    """Step over rows and over context, encoding over picture tokens; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rows, context, pictures) = pyplot.subplots(1, 3, figsize=(12, 3.4))
    for axis, points, name, label in (
        (rows, result["by_rows"], "rows", "rows"),
        (context, result["by_context"], "context", "context of each of 8 rows"),
    ):
        for figure_name, style, legend in (
            ("floor_ms", "k--", "floor"),
            ("bare_ms", "o-", "bare loop"),
            ("engine_ms", "s-", "engine"),
        ):
            axis.plot(
                [p[name] for p in points],
                [p[figure_name] for p in points],
                style,
                label=legend,
                markersize=4,
            )
        axis.set_xlabel(label)
        axis.set_ylabel("ms a step")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)
    for count in (1, 4):
        found = [p for p in result["pictures"] if p["pictures"] == count]
        tokens = [p["tokens"] * count for p in found]
        pictures.plot(
            tokens,
            [p["ms"] for p in found],
            "o-",
            label=f"{count} to a request",
            markersize=4,
        )
    pictures.set_xlabel("picture tokens")
    pictures.set_ylabel("ms to encode")
    pictures.set_ylim(bottom=0)
    pictures.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument(
        "--context",
        type=int,
        default=600,
        help="tokens of each row in the table by rows",
    )
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[256, 1024, 2048],
        help="of the table by context",
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="of which the fastest counts (default: 2)"
    )
    parser.add_argument(
        "--out", type=Path, help="a folder for limits.json and limits.png"
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "work"),
        default="wall",
        help="work: CPU time, for a busy CPU",
    )
    args = parser.parse_args()
    if args.clock == "work":
        WorkClock().install()
    blas.limit_threads(max(1, (os.cpu_count() or 1) // 2))
    console = Console(width=None if os.isatty(1) else 140)
    result = run(args, console)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "limits.json").write_text(json.dumps(result), encoding="utf-8")
        if not draw(args.out / "limits.png", result):
            console.print(
                "no picture: matplotlib is not installed (pip install 'vlm-batch[bench]')",
                markup=False,
            )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
