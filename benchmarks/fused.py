"""Products of one input as one (``vlm_batch.adapters.shared``) against each by itself: queries, keys and values, gate and up.

    python -m benchmarks.fused                       a GPU: layers of a 3B model; a CPU: six layers of 512
    python -m benchmarks.fused --layers 12 --kinds "4 bits"

Times decode steps and prompts of the same model both ways, in turns, and says whether bits are the same: of each product by
its number of rows, and of a step's logits. The model is Qwen2.5-VL's with random weights and a small vocabulary. On a CPU a
second is one of the process's CPU time. Prints each line as it is measured, and JSON as the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import islice
from typing import Any

from vlm_batch.runtime import blas

blas.preload_openblas()  # before anything imports mlx.core

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402

from benchmarks.compare.shapes import SHAPES, Shape, build  # noqa: E402
from vlm_batch.adapters.base import Adapter  # noqa: E402
from vlm_batch.adapters.modules import clone_modules  # noqa: E402
from vlm_batch.adapters.shared import share_products, shared_layers, widened  # noqa: E402
from vlm_batch.engine.compiled import CompiledDecode  # noqa: E402
from vlm_batch.engine.shapes import FreeShapes  # noqa: E402
from vlm_batch.engine.trial import Trial  # noqa: E402
from vlm_batch.loading import adapt  # noqa: E402
from vlm_batch.policy import policy_of  # noqa: E402
from vlm_batch.runtime.device import Device, device  # noqa: E402
from vlm_batch.store.digest import array_bytes  # noqa: E402

FOUR_BITS = "4 bits"
ROWS = (1, 4, 8, 32)
#: Rows of a product that are compared beside these: those of prompts.
PROMPT_ROWS = (64, 256, 1024)
#: Prompts in an array, and their length.
PROMPTS = ((1, 64), (1, 1024), (4, 256))
#: Tokens of a row that decodes; vocabulary.
CONTEXT, WORDS = 200, 8192

_clock = time.process_time if device() is Device.CPU else time.perf_counter


def shape_of(kind: str, layers: int | None) -> Shape:
    """The shape for this device, with fewer words, and one block of its tower."""
    shape = SHAPES["small" if device() is Device.CPU else "3b"]
    text = {
        **shape.text,
        "vocab_size": WORDS,
        "num_hidden_layers": layers or shape.text["num_hidden_layers"],
    }
    half = "float32" if device() is Device.CPU else "bfloat16"
    dtype = half if kind == FOUR_BITS else kind
    return replace(
        shape,
        text=text,
        vision={**shape.vision, "depth": 1, "fullatt_block_indexes": [0]},
        dtype=dtype,
    )


def model_of(kind: str, layers: int | None) -> nn.Module:
    """The model, quantised where that is asked for."""
    model: nn.Module = build(shape_of(kind, layers))
    if kind == FOUR_BITS:
        nn.quantize(model.language_model, group_size=64, bits=4)
        mx.eval(model.parameters())
    return model


def equal_products(adapter: Adapter) -> dict[str, list[int]]:
    """The numbers of rows at which the parts of a wide product are the narrow products to the last bit, by what it is of."""
    found: dict[str, list[int]] = {}
    for _, layers in shared_layers(adapter):
        name = "+".join(layers)
        if name in found:
            continue
        narrow: list[Any] = list(layers.values())
        wide = widened([clone_modules(layer) for layer in narrow])
        weight, scales = narrow[0].weight, narrow[0].get("scales", narrow[0].weight)
        width = (
            weight.shape[1] * 32 // narrow[0].bits
            if "scales" in narrow[0]
            else weight.shape[1]
        )
        found[name] = []
        for rows in (*ROWS, *PROMPT_ROWS):
            shape = (rows, 1, width) if rows <= max(ROWS) else (1, rows, width)
            given = mx.random.normal(shape).astype(scales.dtype)
            pairs = [
                (layer(given), wide.part(at, given)) for at, layer in enumerate(narrow)
            ]
            if all(
                (array_bytes(one) == array_bytes(mx.contiguous(other))).all()
                for one, other in pairs
            ):
                found[name].append(rows)
    return found


class Way:
    """One of the two ways to compute a model's layers, with its steps and prompts."""

    def __init__(self, adapter: Adapter) -> None:
        policy = policy_of({})
        self.adapter = adapter
        self.shapes = FreeShapes.of(adapter, None, policy)
        self.trial = Trial(adapter, None, self.shapes)

    def steps(self, rows: int, *, compiled: bool) -> Callable[[], mx.array]:
        """The next tokens of so many rows, at each call those of one step more."""
        decode = partial(self.adapter.decode, call=self.shapes.decode_call())
        graph = CompiledDecode(decode, uses_before_graph=0) if compiled else None
        steps = self.trial.steps(
            [self.trial.row(CONTEXT)] * rows, rows, columns=512, decode=graph
        )
        return lambda: mx.argmax(next(steps), axis=-1)

    def logits(self, rows: int, count: int) -> list[mx.array]:
        """The logits of some steps."""
        made = [self.trial.row(CONTEXT - 4 * at, at) for at in range(rows)]
        return list(islice(self.trial.steps(made, rows), count))

    def prompts(self, count: int, length: int) -> Callable[[], mx.array]:
        """The logits of some prompts of one length in one array, at each call anew."""
        prompts = [self.trial.prompt(length, seed) for seed in range(count)]
        return lambda: self.trial.prefilled(prompts)[0]


def in_turns(
    ways: Sequence[Callable[[], mx.array]], runs: int, rounds: int
) -> list[float]:
    """Milliseconds of a call of each: the least of some rounds in turns, of ``runs`` calls launched one after another each."""
    taken: list[list[float]] = [[] for _ in ways]
    for number in range(rounds + 1):
        for way, times in zip(ways, taken, strict=True):
            before: mx.array | None = None
            begin = _clock()
            for _ in range(runs):
                made = way()
                mx.async_eval(made)
                if before is not None:
                    mx.eval(before)  # the step before is read while this one runs
                before = made
            mx.eval(before)
            if number:  # the first round makes what is made once
                times.append(1000 * (_clock() - begin) / runs)
    return [min(times) for times in taken]


def measured(
    kind: str, args: argparse.Namespace, is_late: Callable[[], bool]
) -> dict[str, Any]:
    """What one kind of weights has shown; it is printed as it comes."""
    model = model_of(kind, args.layers)
    narrow = policy_of({"wide_products": False})
    plain = Way(adapt(model, policy=narrow))
    products = equal_products(plain.adapter)
    own = adapt(model, policy=narrow)
    print(
        f"{kind}: {share_products(own)} layers are parts of wide ones; equal bits at rows {products}",
        flush=True,
    )
    wide = Way(own)
    found: dict[str, Any] = {
        "kind": kind,
        "equal": products,
        "steps": [],
        "prompts": [],
    }
    works: list[
        tuple[str, int, Callable[[Way], Callable[[], mx.array]], dict[str, Any]]
    ] = []
    for rows in args.rows:
        for compiled in (False, True) if device() is not Device.CPU else (False,):
            said = {"rows": rows, "compiled": compiled}
            works.append(
                (
                    "steps",
                    args.steps,
                    partial(Way.steps, rows=rows, compiled=compiled),
                    said,
                )
            )
    for count, length in PROMPTS:
        works.append(
            (
                "prompts",
                4,
                partial(Way.prompts, count=count, length=length),
                {"count": count, "length": length},
            )
        )
    for name, runs, make, said in works:
        if is_late():
            break
        try:
            apart, together = in_turns([make(plain), make(wide)], runs, args.rounds)
        except Exception as error:  # one kind that a device cannot do leaves the others
            print(f"  {name} {said}: {type(error).__name__}: {error}", flush=True)
            continue
        line = {**said, "ms": apart, "wide_ms": together, "ratio": together / apart}
        if name == "steps" and not said["compiled"]:
            pairs = zip(
                plain.logits(said["rows"], 3), wide.logits(said["rows"], 3), strict=True
            )
            line["equal"] = all(
                (array_bytes(one) == array_bytes(other)).all() for one, other in pairs
            )
        found[name].append(line)
        told = ", ".join(
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in line.items()
        )
        print(f"  {name[:-1]}: {told}", flush=True)
    del plain, wide, own
    mx.clear_cache()
    before = mx.get_active_memory()
    kept = adapt(model, policy=narrow)
    share_products(kept, model)
    mx.clear_cache()
    found["more_mb"] = (mx.get_active_memory() - before) / 1e6
    print(
        f"  memory beyond the model's own, the caller keeping it: {found['more_mb']:.1f} MB",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = (
        ["float32", FOUR_BITS]
        if device() is Device.CPU
        else ["bfloat16", FOUR_BITS, "float16"]
    )
    parser.add_argument("--kinds", nargs="+", default=kinds)
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument(
        "--layers", type=int, help="of the decoder (default: the shape's)"
    )
    parser.add_argument("--steps", type=int, default=20, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--budget",
        type=float,
        default=420,
        help="seconds after which nothing new is begun",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, (os.cpu_count() or 1) // 2),
        help="of the BLAS on a CPU",
    )
    args = parser.parse_args()
    blas.limit_threads(args.threads)
    ends = time.perf_counter() + args.budget
    found = []
    for kind in args.kinds:
        if time.perf_counter() < ends:
            found.append(measured(kind, args, lambda: time.perf_counter() > ends))
    print(
        json.dumps(
            {"device": str(mx.default_device()), "mlx": version("mlx"), "kinds": found}
        )
    )


if __name__ == "__main__":
    main()
