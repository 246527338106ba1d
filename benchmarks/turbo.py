"""TurboQuant beside uniform bits and exact keys: python -m benchmarks.turbo [--help]

Five tables. Launches: operations that one layer starts on a GPU. Memory: bytes of keys and values as a share of exact ones in
bfloat16. Time: a decode step, a prompt and a whole load, as shares of exact ones within one run. Error: how far attention's
output is off. Answers: how many tokens of the embedded models' answers are those with exact keys and values. Models of the
third table are random; ``--shape`` says how large. Seconds are of processor time on a CPU, of wall time on a GPU. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from vlm_batch.runtime import blas
from vlm_batch.runtime.blas import preload_openblas

preload_openblas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_vlm.models.cache import KVCache  # noqa: E402

from benchmarks.caches import clock, text_prompt, words  # noqa: E402
from vlm_batch import VLMBatcher  # noqa: E402
from vlm_batch.adapters import turning  # noqa: E402
from vlm_batch.adapters.attention import attention  # noqa: E402
from vlm_batch.adapters.base import Adapter  # noqa: E402
from vlm_batch.adapters.cuda import coding  # noqa: E402
from vlm_batch.adapters.cuda.launches import Launch  # noqa: E402
from vlm_batch.assets import default_checkpoint  # noqa: E402
from vlm_batch.caches import Placement, lookups, turbo  # noqa: E402
from vlm_batch.caches.layers import kind_of  # noqa: E402
from vlm_batch.caches.quantisation import KVQuantisation  # noqa: E402
from vlm_batch.engine.batch import DecodeBatch  # noqa: E402
from vlm_batch.engine.generator import BatchGenerator  # noqa: E402
from vlm_batch.engine.row import Prompt, new_row  # noqa: E402
from vlm_batch.engine.shapes import FreeShapes  # noqa: E402
from vlm_batch.models import adapter_for  # noqa: E402
from vlm_batch.policy import KERNEL, PACKED, UNPACKED, policy_of  # noqa: E402
from vlm_batch.records import DecodeStep  # noqa: E402
from vlm_batch.runtime.device import Device  # noqa: E402
from vlm_batch.types import SamplingParams  # noqa: E402

VOCABULARY = 4096
BITS = (2.5, 3, 3.5, 4, 8)
SCHEMES: dict[str, KVQuantisation | None] = {
    "exact": None,
    "uniform 4": KVQuantisation(4),
    "uniform 8": KVQuantisation(8),
    **{
        f"turboquant {bits:g}": KVQuantisation(bits, scheme="turboquant")
        for bits in BITS
    },
}


class Shape(NamedTuple):
    layers: int
    heads: int
    kv_heads: int
    depth: int
    dtype: mx.Dtype

    def __str__(self) -> str:
        name = str(self.dtype).rpartition(".")[2]
        return f"{self.layers} layers, {self.heads} heads over {self.kv_heads} of {self.depth}, {name}"


#: ``small`` fits two cores; ``large`` has the layers of a model of 7B. In ``apart`` heads share no keys.
SHAPES = {
    "small": Shape(3, 8, 4, 64, mx.float32),
    "large": Shape(8, 32, 8, 128, mx.bfloat16),
    "apart": Shape(8, 32, 32, 64, mx.bfloat16),
    "wide": Shape(8, 16, 4, 256, mx.float16),
}


def model_of(shape: Shape) -> Adapter:
    """A random text decoder of qwen2_vl."""
    from mlx_vlm.models import qwen2_vl

    width = shape.heads * shape.depth
    text = qwen2_vl.TextConfig(
        model_type="qwen2_vl",
        hidden_size=width,
        num_hidden_layers=shape.layers,
        intermediate_size=4 * width,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        rms_norm_eps=1e-6,
        vocab_size=VOCABULARY,
        rope_theta=1e6,
        max_position_embeddings=32768,
        rope_scaling={
            "type": "mrope",
            "mrope_section": [part * shape.depth // 64 for part in (8, 12, 12)],
        },
    )
    vision = qwen2_vl.VisionConfig(
        depth=1, embed_dim=64, hidden_size=width, num_heads=2, mlp_ratio=2.0
    )
    config = qwen2_vl.ModelConfig(
        model_type="qwen2_vl",
        vocab_size=VOCABULARY,
        image_token_id=VOCABULARY - 4,
        video_token_id=VOCABULARY - 1,
        vision_start_token_id=VOCABULARY - 3,
        text_config=text,
        vision_config=vision,
    )
    mx.random.seed(7)
    model = qwen2_vl.Model(config)
    model.set_dtype(shape.dtype)
    mx.eval(model.parameters())
    return adapter_for("qwen2_vl")(model)


# Launches -------------------------------------------------------------------------------------------------------------

#: What MLX does without a kernel, unless it has to copy.
VIEWS = {"Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Transpose", "View"}
VIEWS |= {"Split", "Squeeze", "Unflatten"}
#: A node of an operation in a graph that MLX exports.
OPERATION = re.compile(r'label ="([A-Za-z]+)[^"]*", shape=rectangle')


def launches(args: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Operations and kernels that one layer starts on CUDA: 32 heads over 8 of 128, bfloat16, 8 rows.

    A step codes and stores a token of each row, and attends; a prompt codes and stores a chunk of 512, looks up all keys and
    values, and attends. The attention itself is not counted, for exact keys neither. They are counted on a CPU, where MLX
    quantises and dequantises uniform bits in many operations: those of a GPU are 2 and 2.
    """
    found: dict[str, dict[str, int]] = {}
    kernels: list[Launch] = []

    def stand_in(launch: Launch, _: Any) -> list[mx.array]:
        kernels.append(launch)
        pairs = zip(launch.shapes, launch.dtypes, strict=True)
        outputs = [mx.zeros(shape, dtype) for shape, dtype in pairs]
        mx.eval(outputs)
        return outputs

    print("\noperations of a layer on CUDA, without the attention itself")
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(coding, "on_device", stand_in))
        for module in (lookups, turbo, turning, coding):
            patch = mock.patch.object(module, "device", return_value=Device.CUDA)
            stack.enter_context(patch)
        for check in ("_is_right", "_restores_right"):
            patch = mock.patch.object(coding, check, return_value=True)
            stack.enter_context(patch)
        for name, kv in SCHEMES.items():
            counts = {
                "step": _count(_step_layer(kv), kernels),
                "chunk": _count(_chunk_layer(kv), kernels),
            }
            found[name] = counts
            line = "".join(f"  {case} {count}" for case, count in counts.items())
            print(f"{name}:{line}", flush=True)
    return found


def _count(layer: Callable[[], list[mx.array]], kernels: list[Launch]) -> int:
    """Return how many operations and kernels a call starts; ``kernels`` holds those that were."""
    mx.eval(layer())  # constants are made once
    kernels.clear()
    graph = io.StringIO()
    mx.export_to_dot(graph, *layer())
    counts = Counter(OPERATION.findall(graph.getvalue()))
    operations = sum(count for name, count in counts.items() if name not in VIEWS)
    return operations + len(kernels)


def _step_layer(kv: KVQuantisation | None) -> Callable[[], list[mx.array]]:
    """Return what a step of 8 rows makes, unevaluated."""
    own = KVCache() if kv is None else kv.empty()
    own.update_and_fetch(*_random((1, 8, 40, 128), 2))
    layer: Any = kind_of(own).batched(Placement.SLAB, 8)
    layer.few_bits = KERNEL
    for place in range(8):
        layer.put(place, own)
    layer.resize(8)
    (queries,), (keys, values) = _random((8, 32, 1, 128), 1), _random((8, 8, 1, 128), 2)
    mx.eval(queries, keys, values, layer.arrays())
    kernels = turning.Kernels(attend=lambda queries, *_: queries)

    def step() -> list[mx.array]:
        all_keys, all_values = layer.update_and_fetch(keys, values)
        if not isinstance(all_keys, turning.TurboStates):
            return list(layer.arrays())
        asked = turning.TurnedAttention(queries, all_keys, all_values, 0.1, None, None)
        return [turning.attend_step(asked, kernels), *layer.arrays()]

    return step


def _chunk_layer(kv: KVQuantisation | None) -> Callable[[], list[mx.array]]:
    """Return what a chunk of a prompt makes behind another, unevaluated."""
    own = KVCache() if kv is None else kv.empty()
    (queries,), chunk = _random((1, 32, 512, 128), 1), _random((1, 8, 512, 128), 2)
    kernels = turning.Kernels(restore=coding.restore_where_right)

    def attend(_: Any, keys: mx.array, values: mx.array, **__: Any) -> mx.array:
        return keys

    def layer() -> list[mx.array]:
        states = own.update_and_fetch(*chunk)
        if kv is None:
            return list(states)
        all_keys, all_values = states
        if not isinstance(all_keys, turning.TurboStates):
            return [one.dequantized() for one in states]
        terms = (0.1, "causal", None)
        asked = turning.TurnedAttention(queries, all_keys, all_values, *terms)
        output = turning.attend_prompt(asked, attend, kernels)
        held = [part for one in (own.keys, own.values) for part in one.parts]
        return [output, *held]

    return layer


def _random(shape: tuple[int, ...], count: int) -> list[mx.array]:
    return [mx.random.normal(shape).astype(mx.bfloat16) for _ in range(count)]


# Memory ---------------------------------------------------------------------------------------------------------------


def memory(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Shares of exact keys and values in bfloat16, of 32 heads of 128."""
    found: dict[str, dict[str, float]] = {}
    print("\nbytes of keys and values, of exact ones in bfloat16: 32 heads of 128")
    for tokens, rows in ((512, 4), (20000, 1)):
        exact = _slab_bytes(KVCache(), tokens, rows)
        shares: dict[str, float] = {}
        for name, kv in SCHEMES.items():
            if kv is not None:
                shares[name] = _slab_bytes(kv.empty(), tokens, rows) / exact
        found[f"{rows} x {tokens}"] = shares
        line = "".join(f"  {name} {share:.3f}" for name, share in shares.items())
        print(f"{rows} rows of {tokens} tokens:{line}", flush=True)
    return found


def _slab_bytes(cache: Any, tokens: int, rows: int) -> int:
    array = mx.random.normal((1, 32, tokens, 128)).astype(mx.bfloat16)
    cache.update_and_fetch(array, array)
    layer = kind_of(cache).batched(Placement.SLAB, rows)
    for place in range(rows):
        layer.put(place, cache)
    mx.eval(layer.arrays())
    return layer.nbytes


# Time -----------------------------------------------------------------------------------------------------------------


def step_of(
    adapter: Adapter, kv: KVQuantisation | None, shape: Shape, args: argparse.Namespace
) -> float:
    """Return the median seconds of a decode step of ``args.rows`` rows of ``args.context`` random tokens."""
    said = {"placement": args.placement}
    if args.few_bits:
        said["few_bits"] = args.few_bits
    shapes = FreeShapes(Placement(args.placement), policy_of(said))
    batch = DecodeBatch(shapes, args.rows)
    mx.random.seed(3)
    for index in range(args.rows):
        own = adapter.make_cache(kv)
        for cache in own:
            size = (1, shape.kv_heads, args.context, shape.depth)
            keys, values = (
                mx.random.normal(size).astype(shape.dtype) for _ in range(2)
            )
            cache.update_and_fetch(keys, values)
            mx.eval(cache.state)
        batch.join(new_row(str(index), Prompt(), SamplingParams()), own)
    mx.eval([layer.arrays() for layer in batch.layers])
    seconds: list[float] = []
    for step in range(args.steps + 2):
        began = clock()
        positions = mx.full((args.rows,), args.context + step, dtype=mx.int32)
        tokens = mx.full((args.rows, 1), 5, dtype=mx.int32)
        extras: list[dict[str, Any]] = [{}] * args.rows
        mx.eval(adapter.decode(DecodeStep(tokens, positions, batch.layers, extras)))
        seconds.append(clock() - began)
    return statistics.median(seconds[2:])


def load_of(
    adapter: Adapter,
    kv: KVQuantisation | None,
    prompts: Sequence[int],
    tokens: int,
    args: argparse.Namespace,
) -> float:
    """Return the seconds of requests with prompts of so many tokens, and answers of ``tokens``."""
    said: dict[str, Any] = {"placement": args.placement}
    if args.few_bits:
        said["few_bits"] = args.few_bits
    generator = BatchGenerator(adapter, kv=kv, policy=policy_of(said))
    began = clock()
    for index, length in enumerate(prompts):
        prompt = text_prompt(words(index, length))
        generator.insert(str(index), prompt, SamplingParams(max_tokens=tokens))
    while generator.has_work:
        for event in generator.step():
            assert event.result is None or event.result.error is None, event.result
    return clock() - began


def timing(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    shape = SHAPES[args.shape]
    adapter = model_of(shape)
    rows, context = args.rows, args.context
    print(f"\nseconds, of exact ones: {shape}, {args.placement} {args.few_bits or ''}")
    load = [context * share // 8 for share in (2, 3, 4, 5, 6, 7, 8, 2)] * 2
    cases: dict[str, Callable[[KVQuantisation | None], float]] = {
        f"step of {rows} x {context}": lambda kv: step_of(adapter, kv, shape, args),
        f"prompt of {context}": lambda kv: load_of(adapter, kv, [context], 1, args),
        f"load of {len(load)}, answers of {args.tokens}": lambda kv: load_of(
            adapter, kv, load, args.tokens, args
        ),
    }
    found: dict[str, dict[str, float]] = {}
    for case, run in cases.items():
        times: dict[str, list[float]] = {name: [] for name in args.schemes}
        for turn in range(args.repeats + 1):
            for name in args.schemes:
                seconds = run(SCHEMES[name])
                mx.clear_cache()
                if turn:  # the first makes kernels
                    times[name].append(seconds)
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        found[case] = medians
        line = "".join(
            f"  {name} {seconds * 1e3:.1f} ms ({seconds / medians['exact']:.2f})"
            for name, seconds in medians.items()
        )
        print(f"{case}:{line}", flush=True)
    return found


# Error ----------------------------------------------------------------------------------------------------------------


def error(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Relative error of attention's output over random keys and values, and over such with large channels."""
    found: dict[str, dict[str, float]] = {}
    print("\nrelative error of attention's output: 8 heads over 4 of 128, 1,024 tokens")
    for case, large in (
        ("normal numbers", 1.0),
        ("4 channels of keys 10 times as large", 10.0),
    ):
        mx.random.seed(11)
        keys, values = (mx.random.normal((1, 4, 1024, 128)) for _ in range(2))
        channels = mx.where(mx.arange(128) % 32 == 5, large, 1.0)
        keys = keys * channels
        # queries that look for some keys, as trained ones do
        sought = mx.repeat(keys[:, :, 100:164], 2, axis=1)
        queries = sought / channels + mx.random.normal(sought.shape)
        scale = 128**-0.5
        right = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)
        errors: dict[str, float] = {}
        for name, kv in SCHEMES.items():
            if kv is None:
                continue
            states = kv.empty().update_and_fetch(keys, values)
            off = attention(queries, *states, None, scale) - right
            errors[name] = float(mx.linalg.norm(off) / mx.linalg.norm(right))
        found[case] = errors
        line = "".join(f"  {name} {off:.3f}" for name, off in errors.items())
        print(f"{case}:{line}", flush=True)
    return found


def answers(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Share of the answers' tokens that come before the first other one, of the embedded models."""
    root = Path(__file__).parents[1] / "fixtures"
    asked: dict[str, tuple[Any, list[tuple[Any, str]]]] = {
        "counts": (default_checkpoint(), [(None, f"count to {n}") for n in (5, 9, 12)]),
        "reads": (
            str(root / "reader"),
            [
                (str(path), "Read the text.")
                for path in sorted((root / "images").glob("*.png"))
            ][: args.pictures],
        ),
    }
    found: dict[str, dict[str, float]] = {}
    print("\nshare of tokens up to the first that is not the exact answer's")
    for case, (checkpoint, questions) in asked.items():
        texts = {
            name: _tokens(checkpoint, questions, _of_narrow_heads(kv))
            for name, kv in SCHEMES.items()
        }
        right = texts.pop("exact")
        shares = {name: _same(own, right) for name, own in texts.items()}
        found[case] = shares
        line = "".join(f"  {name} {share:.3f}" for name, share in shares.items())
        count = sum(map(len, right))
        print(f"{case}, {len(right)} answers, {count} tokens:{line}", flush=True)
    return found


def _of_narrow_heads(kv: KVQuantisation | None) -> KVQuantisation | None:
    """Return settings for the embedded models' heads of 32 numbers."""
    return None if kv is None else replace(kv, group_size=32)


def _tokens(
    checkpoint: Any, questions: Sequence[tuple[Any, str]], kv: KVQuantisation | None
) -> list[tuple[int, ...]]:
    with VLMBatcher(checkpoint, kv=kv) as batcher:
        handles = [
            batcher.submit(*given, params={"max_tokens": 200}) for given in questions
        ]
        results = [handle.result() for handle in handles]
    return [result.token_ids for result in results if result.error is None]


def _same(own: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> float:
    same = 0
    for found, wanted in zip(own, right, strict=True):
        is_same = [one == other for one, other in zip(found, wanted, strict=False)]
        same += int(np.argmin([*is_same, False]))
    return same / sum(map(len, right))


TABLES: dict[str, Callable[[argparse.Namespace], Any]] = {
    "launches": launches,
    "memory": memory,
    "time": timing,
    "error": error,
    "answers": answers,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    is_gpu = mx.default_device().type == mx.DeviceType.gpu
    say = parser.add_argument
    say("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    say("--shape", choices=list(SHAPES), default="large" if is_gpu else "small")
    say("--rows", type=int, default=8)
    say("--context", type=int, default=4096)
    say("--tokens", type=int, default=64, help="of each answer of the load")
    say("--steps", type=int, default=7, help="timed decode steps")
    say("--repeats", type=int, default=3, help="of everything timed")
    say("--pictures", type=int, default=6, help="of the embedded reader")
    say("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    placements = [placement.value for placement in Placement]
    say("--placement", choices=placements, default=Placement.for_device().value)
    say("--few-bits", choices=[PACKED, UNPACKED, KERNEL], help="default: the device's")
    args = parser.parse_args()
    blas.limit_threads(max(1, (os.cpu_count() or 1) // 2))
    print(json.dumps({name: TABLES[name](args) for name in args.tables}, default=str))


if __name__ == "__main__":
    main()
