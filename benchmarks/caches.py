"""What is kept and what is saved: python -m benchmarks.caches [--help]

Three tables, each of ratios within one run. Keys and values in few bits: bytes and seconds of a decode step at several
numbers of rows and contexts. Earlier rows' state: time to the first token of a prompt that is cold, the same again, the
same picture with another question, and longer; for a model with full attention and for one with recurrent layers. Vision
features: a picture that comes again in another prompt. Models are small and random; answers are checked where they are
reused. Seconds are of processor time on a CPU, of wall time on a GPU. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from vlm_batch.adapters.towers import remember_features
from vlm_batch.runtime import blas
from vlm_batch.runtime.blas import preload_openblas

preload_openblas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from vlm_batch.adapters.base import Adapter  # noqa: E402
from vlm_batch.caches import Placement  # noqa: E402
from vlm_batch.caches.quantisation import KVQuantisation  # noqa: E402
from vlm_batch.engine.batch import DecodeBatch  # noqa: E402
from vlm_batch.engine.generator import BatchGenerator  # noqa: E402
from vlm_batch.engine.reuse import Reuse  # noqa: E402
from vlm_batch.engine.row import Prompt, new_row  # noqa: E402
from vlm_batch.engine.shapes import FreeShapes  # noqa: E402
from vlm_batch.models import adapter_for  # noqa: E402
from vlm_batch.policy import KERNEL, PACKED, UNPACKED, Policy, policy_of  # noqa: E402
from vlm_batch.records import DecodeStep  # noqa: E402
from vlm_batch.store.budget import ByteBudget  # noqa: E402
from vlm_batch.store.features import FeatureStore  # noqa: E402
from vlm_batch.store.prefix import PrefixCache  # noqa: E402
from vlm_batch.types import SamplingParams  # noqa: E402

WIDTH, HEADS, KV_HEADS, VOCABULARY = 512, 8, 4, 4096
IMAGE = VOCABULARY - 4
START = VOCABULARY - 3
END = VOCABULARY - 2
VIDEO = VOCABULARY - 1
SCHEMES: dict[str, KVQuantisation | None] = {
    "exact": None,
    "8 bits": KVQuantisation(8),
    "4 bits": KVQuantisation(4),
    "turboquant 4": KVQuantisation(4, scheme="turboquant"),
    "turboquant 3.5": KVQuantisation(3.5, scheme="turboquant"),
}


def plain_model(layers: int, kv_heads: int = KV_HEADS) -> Adapter:
    """qwen2_vl with ``layers`` of 512, 8 heads of 64 over 4 of keys and values, and a vision tower of 4 blocks of 256."""
    from mlx_vlm.models import qwen2_vl

    text = qwen2_vl.TextConfig(
        model_type="qwen2_vl",
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        intermediate_size=2048,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-6,
        vocab_size=VOCABULARY,
        rope_theta=1e6,
        max_position_embeddings=32768,
        rope_scaling={"type": "mrope", "mrope_section": [8, 12, 12]},
    )
    vision = qwen2_vl.VisionConfig(
        depth=4,
        embed_dim=256,
        hidden_size=WIDTH,
        num_heads=4,
        mlp_ratio=4.0,
        patch_size=14,
        spatial_patch_size=14,
    )
    config = qwen2_vl.ModelConfig(
        model_type="qwen2_vl",
        vocab_size=VOCABULARY,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        text_config=text,
        vision_config=vision,
    )
    return _adapted("qwen2_vl", qwen2_vl.Model(config))


def hybrid_model(layers: int) -> Adapter:
    """qwen3_5 with ``layers`` of 512, of which every fourth has keys and values and the others a recurrent state."""
    from mlx_vlm.models import qwen3_5

    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": WIDTH,
        "intermediate_size": 2048,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 64,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32768,
        "full_attention_interval": 4,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "type": "default",
            "mrope_section": [3, 3, 2],
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
        },
    }
    vision = {
        "model_type": "qwen3_5",
        "depth": 1,
        "hidden_size": 64,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
    }
    vision |= {
        "intermediate_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [],
    }
    config = qwen3_5.ModelConfig(
        text_config=qwen3_5.TextConfig.from_dict(text),
        vision_config=qwen3_5.VisionConfig.from_dict(vision),
        model_type="qwen3_5",
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        vocab_size=VOCABULARY,
    )
    return _adapted("qwen3_5", qwen3_5.Model(config))


def _adapted(name: str, model: Any) -> Adapter:
    mx.random.seed(7)
    if mx.default_device().type == mx.DeviceType.cpu:
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return adapter_for(name)(model)


def clock() -> float:
    """Seconds: of this process's own work on a CPU, which other processes share; of the wall's clock on a GPU."""
    is_cpu = mx.default_device().type == mx.DeviceType.cpu
    return time.process_time() if is_cpu else time.perf_counter()


# Keys and values in few bits -----------------------------------------------------------------------------------------


def decode_of(
    adapter: Adapter,
    rows: int,
    context: int,
    kv: KVQuantisation | None,
    args: argparse.Namespace,
) -> tuple[int, float]:
    """(bytes of all rows' keys and values, median seconds of a decode step) for rows of random keys and values."""
    few_bits = args.few_bits or policy_of({"placement": args.placement}).few_bits
    batch = DecodeBatch(
        FreeShapes(Placement(args.placement), Policy(few_bits=few_bits)), rows
    )
    dtype = adapter.model.language_model.model.embed_tokens.weight.dtype
    for index in range(rows):
        row = new_row(str(index), Prompt(), SamplingParams())
        own = adapter.make_cache(kv)
        for cache in own:
            keys, values = (
                mx.random.normal((1, args.kv_heads, context, WIDTH // HEADS)).astype(
                    dtype
                )
                for _ in range(2)
            )
            cache.update_and_fetch(keys, values)
        mx.eval([cache.state for cache in own])
        batch.join(row, own)
    mx.eval([layer.arrays() for layer in batch.layers])
    held = batch.nbytes
    seconds = []
    for step in range(args.steps + 2):
        began = clock()
        positions = mx.full((rows,), context + step, dtype=mx.int32)
        tokens = mx.full((rows, 1), 5, dtype=mx.int32)
        mx.eval(
            adapter.decode(DecodeStep(tokens, positions, batch.layers, [{}] * rows))
        )
        seconds.append(clock() - began)
    return held, statistics.median(seconds[2:])


def quantisation(args: argparse.Namespace) -> list[dict[str, Any]]:
    adapter = plain_model(args.layers, args.kv_heads)
    print(
        f"\nkeys and values in few bits: {args.layers} layers, {HEADS} heads over {args.kv_heads} of {WIDTH // HEADS}, "
        f"{args.placement}"
    )
    print(f"{'context':>8} {'rows':>4}  " + "".join(f"{name:>32}" for name in SCHEMES))
    found = []
    for context in args.contexts:
        for rows in args.rows:
            line = f"{context:>8} {rows:>4}  "
            for name, kv in SCHEMES.items():
                if name.startswith("turbo") and context > args.turbo_up_to:
                    line += f"{'-':>32}"
                    continue
                held, seconds = decode_of(adapter, rows, context, kv, args)
                if kv is None:
                    exact = held, seconds
                size, speed = exact[0] / held, exact[1] / seconds
                line += f"{held / 1e6:>9.1f} MB {size:>5.2f}x {seconds * 1e3:>7.1f} ms {speed:>4.2f}x"
                found.append(
                    {
                        "context": context,
                        "rows": rows,
                        "scheme": name,
                        "bytes": held,
                        "seconds": seconds,
                    }
                )
            print(line, flush=True)
    return found


# Earlier rows' state -------------------------------------------------------------------------------------------------


def first_token(
    generator: BatchGenerator, inputs: dict[str, Any]
) -> tuple[float, tuple[int, ...], int]:
    """(seconds to the first token, the answer, how many tokens were cached)"""
    began = clock()
    generator.insert("a", inputs, SamplingParams(max_tokens=4))
    first, result = 0.0, None
    while generator.has_work:
        for event in generator.step():
            first = first or clock() - began
            result = event.result or result
    assert result is not None and result.error is None, result
    return first, result.token_ids, result.usage.cached_tokens


def picture_prompt(
    question: Sequence[int], *, before: Sequence[int] = (7, 8, 9), side: int = 32
) -> dict[str, Any]:
    """A prompt about one random picture of ``side`` x ``side`` patches."""
    random = np.random.RandomState(3)
    ids = [*before, START, *[IMAGE] * (side * side // 4), END, *question]
    pixels = random.standard_normal((side * side, 3 * 2 * 14 * 14)).astype(np.float32)
    grid = np.array([[1, side, side]], dtype=np.int32)
    return {
        "input_ids": mx.array([ids], dtype=mx.int32),
        "pixel_values": mx.array(pixels),
        "image_grid_thw": mx.array(grid),
    }


def text_prompt(ids: Sequence[int]) -> dict[str, Any]:
    return {"input_ids": mx.array([list(ids)], dtype=mx.int32)}


def words(seed: int, count: int) -> list[int]:
    return [
        int(word)
        for word in np.random.RandomState(seed).randint(1, VOCABULARY - 8, size=count)
    ]


def reuse(args: argparse.Namespace) -> list[dict[str, Any]]:
    print(
        "\nearlier rows' state: milliseconds to the first token (ratio to cold; tokens that were cached)"
    )
    plain, hybrid = plain_model(args.layers * 2), hybrid_model(args.layers * 4)
    system, tail = words(1, 511), words(2, 60)
    cases: list[tuple[str, Adapter, Callable[[list[int]], dict[str, Any]]]] = [
        (
            "full attention, a picture",
            plain,
            lambda more: picture_prompt([*tail, *more]),
        ),
        (
            "full attention, 571 tokens",
            plain,
            lambda more: text_prompt([*system, *tail, *more]),
        ),
        (
            "recurrent layers, 571 tokens",
            hybrid,
            lambda more: text_prompt([*system, *tail, *more]),
        ),
    ]
    found = []
    for name, adapter, prompt in cases:
        is_picture = "picture" in name
        other = (
            picture_prompt(words(5, 60))
            if is_picture
            else text_prompt([*system, *words(5, 60)])
        )
        third = (
            picture_prompt(words(6, 60))
            if is_picture
            else text_prompt([*system, *words(6, 60)])
        )
        times: dict[str, list[float]] = {
            "cold": [],
            "same": [],
            "other question": [],
            "longer": [],
        }
        cached: dict[str, int] = {}
        for _ in range(args.repeats + 1):
            kept = BatchGenerator(
                adapter, reuse=Reuse(adapter, PrefixCache(ByteBudget(2**31)))
            )
            cold = BatchGenerator(adapter)
            asked = {
                "cold": (kept, prompt([])),
                "same": (kept, prompt([])),
                # where recurrent layers learn that prompts part here
                "fork": (kept, other),
                "other question": (kept, third),
                "longer": (kept, prompt(words(4, 30))),
            }
            for case, (generator, inputs) in asked.items():
                seconds, answer, count = first_token(generator, inputs)
                assert answer == first_token(cold, inputs)[1], (
                    f"{name}: {case} answers otherwise than cold"
                )
                if case in times:
                    times[case].append(seconds)
                    cached[case] = count
        medians = {case: statistics.median(taken[1:]) for case, taken in times.items()}
        line = "".join(
            f"  {case} {seconds * 1e3:.1f} ({medians['cold'] / seconds:.1f}x; {cached[case]})"
            for case, seconds in medians.items()
        )
        print(f"{name}:{line}", flush=True)
        found.append({"case": name, "seconds": medians, "cached": cached})
    return found


def features(args: argparse.Namespace) -> dict[str, float]:
    """A picture in another prompt: nothing of the prompt is cached, but the picture is not encoded again."""
    adapter = plain_model(args.layers)
    times: dict[str, list[float]] = {"new": [], "remembered": []}
    for turn in range(args.repeats + 1):
        remember_features(adapter, FeatureStore(ByteBudget(2**31)))
        for case in times:
            inputs = picture_prompt(
                words(3, 20), before=words(turn * 2 + (case == "new"), 3), side=48
            )
            began = clock()
            mx.eval(adapter.encode(inputs).inputs_embeds)
            times[case].append(clock() - began)
    medians = {case: statistics.median(taken[1:]) for case, taken in times.items()}
    print(
        f"\na picture of 48 x 48 patches, encoded: {medians['new'] * 1e3:.1f} ms; in another prompt: "
        f"{medians['remembered'] * 1e3:.1f} ms ({medians['new'] / medians['remembered']:.0f}x)"
    )
    return medians


TABLES: dict[str, Callable[[argparse.Namespace], Any]] = {
    "quantisation": quantisation,
    "reuse": reuse,
    "features": features,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument(
        "--layers",
        type=int,
        default=2,
        help="layers of the quantised model (default: 2)",
    )
    parser.add_argument(
        "--placement",
        choices=[p.value for p in Placement],
        default=Placement.for_device().value,
    )
    parser.add_argument(
        "--kv-heads",
        type=int,
        default=KV_HEADS,
        help="heads of keys and values (default: 4)",
    )
    parser.add_argument(
        "--few-bits",
        choices=[PACKED, UNPACKED, KERNEL],
        help="how slabs are read (default: the device's way)",
    )
    parser.add_argument(
        "--tables", nargs="+", choices=list(TABLES), default=list(TABLES)
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=7,
        help="timed decode steps, of which the median counts",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="timed prompts of each kind, of which the median counts",
    )
    parser.add_argument(
        "--turbo-up-to", type=int, default=4096, help="longest context for turboquant"
    )
    args = parser.parse_args()
    blas.limit_threads(max(1, (os.cpu_count() or 1) // 2))
    print(json.dumps({name: TABLES[name](args) for name in args.tables}))


if __name__ == "__main__":
    main()
