"""What reproducible answers cost, and which part of it costs how much: the same work with one part after another.

For each way it says how long a run took, how long its first tokens and the gaps between tokens were, how the engine's thread
spent its time, and how many forwards were made. The last line is JSON.

    python -m benchmarks.exactness                                   a CPU, 47 M parameters, float32
    python -m benchmarks.exactness --shape 3b                        a GPU, the sizes of Qwen2.5-VL-3B, bfloat16
    python -m benchmarks.exactness --shape 3b --bits 4 --ways not reproducible --workloads single chat-8
"""

from __future__ import annotations

from vlm_batch.runtime import blas

blas.preload_openblas()  # before anything imports mlx.core

import argparse  # noqa: E402
import json  # noqa: E402
import platform  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from dataclasses import dataclass, field, replace  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402

from benchmarks.compare import measure  # noqa: E402
from benchmarks.compare.engines import Driven  # noqa: E402
from benchmarks.compare.shapes import SHAPES, Shape, build  # noqa: E402
from benchmarks.compare.workloads import WORKLOADS, Workload, make_workload  # noqa: E402
from vlm_batch.engine.generator import BatchGenerator  # noqa: E402
from vlm_batch.engine.shapes import FixedShapes, FreeShapes, Shapes  # noqa: E402
from vlm_batch.loading import adapt  # noqa: E402
from vlm_batch.policy import policy_of  # noqa: E402
from vlm_batch.proofs.classes import COUNTS  # noqa: E402
from vlm_batch.proofs.device import versions  # noqa: E402
from vlm_batch.proofs.proving import fixed_shapes  # noqa: E402
from vlm_batch.records import Call  # noqa: E402

REPRODUCIBLE = "reproducible"


@dataclass(frozen=True)
class Way:
    """How an engine is set: the parts of ``reproducible`` that it has, or all of it (``exact``), with other settings than the
    device's (``policy``)."""

    policy: dict[str, Any] = field(default_factory=dict)
    by_shapes: bool = False
    exact: bool = False
    most: int | None = None  # rows in a forward


WAYS = {
    "not": Way(),
    "pictures apart": Way({"encode_together": 1}),
    "prompts apart": Way({"prefill_together": 1}),
    "both apart": Way({"encode_together": 1, "prefill_together": 1}),
    # chunks, which else come in few lengths on a GPU
    "of any length": Way({"pad_to": 0}),
    "and kernels by shape": Way(
        {"encode_together": 1, "prefill_together": 1}, by_shapes=True
    ),
    REPRODUCIBLE: Way(exact=True),
    "in groups of 32": Way(exact=True, most=32),
    "in smaller calls": Way(
        exact=True, policy={"call_tokens": 640, "call_patches": 1024}
    ),
    "each alone": Way(exact=True, policy={"call_tokens": 0, "call_patches": 0}),
}
#: The engine's parts that a step calls, by what the time in them is called.
PARTS = {
    "encode": ("", "_encode"),
    "prefill": ("", "_prefill"),
    "choose": ("", "_choose"),
    "wait": ("telling", "read"),
}
CALLS = ("encode", "encode_together", "prefill", "decode")


@dataclass
class Spent:
    """Seconds of the engine's thread by part, calls of the adapter by name, and places that decode steps had."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    places: int = 0

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **keywords)
            finally:
                self.seconds[name] = (
                    self.seconds.get(name, 0.0) + time.perf_counter() - begin
                )

        return timed

    def counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **keywords: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            if name == "decode":
                self.places += args[0].tokens.shape[0]
            return call(*args, **keywords)

        return counted


class ByShapes(FreeShapes):
    """Free shapes whose kernels go by the shapes of one call alone."""

    def encode_call(self) -> Call:
        return replace(super().encode_call(), is_fixed=True)

    def prefill_call(self, *args: Any, **how: Any) -> tuple[int, int, Call]:
        rows, end, call = super().prefill_call(*args, **how)
        return rows, end, replace(call, is_fixed=True)

    def decode_call(self) -> Call:
        return Call(is_fixed=True)


class Engine(Driven):
    """The engine set in a way, and watched. ``benchmarks.compare`` drives it."""

    def __init__(self, model: Any, workload: Workload, way: Way) -> None:
        adapter: Any = adapt(model)
        policy = policy_of({"max_rows": workload.rows, **way.policy})
        kind = ByShapes if way.by_shapes else FreeShapes
        self._shapes: Shapes = kind.of(adapter, None, policy)
        if way.exact:
            shapes = fixed_shapes(adapter, policy=policy, max_rows=workload.rows)
            counts = tuple(
                count for count in shapes.counts if count <= (way.most or count)
            )
            # with its products, before its calls are watched
            adapter = shapes.adapter(adapter)
            self._shapes = replace(shapes, counts=counts, products=())
        self.spent = Spent()
        for name in CALLS:
            setattr(adapter, name, self.spent.counted(name, getattr(adapter, name)))
        self.generator = BatchGenerator(adapter, policy=policy, shapes=self._shapes)
        for said, (part, name) in PARTS.items():
            owner: Any = getattr(self.generator, part) if part else self.generator
            setattr(owner, name, self.spent.timed(said, getattr(owner, name)))

    @property
    def joint(self) -> dict[str, str]:
        """Prompts and pictures that were to go together, and what spoke against it."""
        shapes = self._shapes
        return dict(shapes.joint.found) if isinstance(shapes, FixedShapes) else {}


def run(model: Any, workload: Workload, way: str) -> dict[str, Any]:
    """One run of a workload in a way; its figures."""
    engines: list[Engine] = []

    def make(model: Any, workload: Workload, contexts: Any) -> Engine:
        engines.append(Engine(model, workload, WAYS[way]))
        return engines[-1]

    trace = measure.measure(make, model, workload, None)
    spent = engines[0].spent
    return {
        "workload": workload.name,
        "way": way,
        **measure.figures(workload, trace),
        "spent": {name: round(seconds, 3) for name, seconds in spent.seconds.items()},
        "calls": spent.calls,
        "places": spent.places,
        "joint": engines[0].joint,
    }


def warm(model: Any, workload: Workload, way: str) -> None:
    """A few tokens of a few requests: kernels are built, and what is proven is proven."""
    asks = [
        replace(ask, max_tokens=min(ask.max_tokens, 4), arrival=0.0)
        for ask in workload.asks[:8]
    ]
    run(model, replace(workload, asks=asks), way)


def rounds(
    model: Any, workloads: Sequence[Workload], ways: Sequence[str], count: int
) -> Iterator[dict[str, Any]]:
    """Every workload in every way, ``count`` times, the ways' order turned around each time."""
    for number in range(count):
        for workload in workloads:
            for way in ways if number % 2 == 0 else ways[::-1]:
                if (
                    WAYS[way].most is not None
                    and workload.rows <= COUNTS[_layout()][-1]
                ):
                    continue  # the same as without
                yield {"round": number + 1, **run(model, workload, way)}


def _layout() -> Any:
    from vlm_batch.caches import Placement

    return Placement.for_device()


def line(found: dict[str, Any]) -> str:
    """A run as a line of text."""
    spent = ", ".join(
        f"{name} {seconds:.2f}" for name, seconds in found["spent"].items()
    )
    calls = ", ".join(f"{count} {name}" for name, count in found["calls"].items())
    times = f"{found['seconds']:6.2f} s, first token {found['ttft_p50']:.2f} / {found['ttft_p95']:.2f}"
    gaps = f"gap {1000 * found['itl_p50']:.1f} / {1000 * found['itl_p95']:.1f} / {1000 * found['itl_max']:.0f} ms"
    return f"{found['workload']:9} {found['way']:21} {times}, {gaps}; {spent}; {calls}; {found['places']} places"


def ratios(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds over those of "not" of the same round, medians, by workload and way."""
    base = {
        (one["workload"], one["round"]): one["seconds"]
        for one in runs
        if one["way"] == "not"
    }
    found: dict[str, dict[str, list[float]]] = {}
    for one in runs:
        if one["way"] != "not" and (one["workload"], one["round"]) in base:
            ratio = one["seconds"] / base[one["workload"], one["round"]]
            found.setdefault(one["workload"], {}).setdefault(one["way"], []).append(
                ratio
            )
    return {
        name: {way: round(median(some), 3) for way, some in ways.items()}
        for name, ways in found.items()
    }


def made(shape: Shape, bits: int | None) -> Any:
    """The model of a shape, its language model in few bits if asked for."""
    model = build(shape)
    if bits is not None:
        nn.quantize(
            model.language_model,
            group_size=64,
            bits=bits,
            class_predicate=lambda path, module: (
                isinstance(module, nn.Linear) and module.weight.shape[-1] % 64 == 0
            ),
        )
    mx.eval(model.parameters())
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument(
        "--bits",
        type=int,
        choices=(4, 8),
        help="the language model's linear layers in so many bits",
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=list(WORKLOADS),
        default=["chat-8", "captions", "single"],
    )
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of OpenBLAS")
    parser.add_argument(
        "--clock",
        choices=("wall", "work"),
        default="wall",
        help="work: CPU time of this process",
    )
    args = parser.parse_args()
    blas.limit_threads(args.threads)
    if args.clock == "work":
        measure.WorkClock().install()
    shape = SHAPES[args.shape]
    model = made(shape, args.bits)
    workloads = [make_workload(name, shape) for name in args.workloads]
    if mx.default_device().type == mx.DeviceType.gpu:
        for workload in workloads:
            for way in args.ways:
                warm(model, workload, way)
    runs = []
    for found in rounds(model, workloads, args.ways, args.rounds):
        runs.append(found)
        print(f"round {found['round']}: {line(found)}", flush=True)
    said = {
        "shape": args.shape,
        "bits": args.bits,
        "device": str(mx.default_device()),
        "machine": platform.machine(),
    }
    print(
        json.dumps(
            {**said, "versions": versions(), "ratios": ratios(runs), "runs": runs}
        )
    )


if __name__ == "__main__":
    main()
