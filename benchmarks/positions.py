"""What a forward with drafts costs in a model with recurrent layers: python -m benchmarks.positions [--bits 4]

A model with the sizes of Qwen3.5-0.8B, eight of its layers and a small vocabulary. The table has processor milliseconds of a
decode forward in which every row has so many positions; the least of several.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from vlm_batch.runtime import blas

blas.preload_openblas()  # before anything imports mlx.core

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from mlx_vlm.models import qwen3_5  # noqa: E402

from vlm_batch.adapters.base import Adapter  # noqa: E402
from vlm_batch.caches import Placement  # noqa: E402
from vlm_batch.engine.shapes import FreeShapes  # noqa: E402
from vlm_batch.engine.trial import Trial  # noqa: E402
from vlm_batch.models import adapter_for  # noqa: E402
from vlm_batch.records import Call, DecodeStep  # noqa: E402

WIDTH, VOCABULARY, PROMPT = 1024, 8192, 100
ROWS, POSITIONS = (1, 4, 8), (1, 2, 4, 8)


def model(layers: int, bits: int | None) -> Adapter:
    rope: dict[str, Any] = {
        "type": "default",
        "mrope_section": [11, 11, 10],
        "rope_theta": 1e7,
    }
    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": WIDTH,
        "intermediate_size": 3584,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_value_heads": 16,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "full_attention_interval": 4,
        "rope_parameters": rope | {"partial_rotary_factor": 0.25},
    }
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
    }
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": []}
    mx.random.seed(0)
    made = qwen3_5.Model(
        qwen3_5.ModelConfig(
            model_type="qwen3_5",
            text_config=qwen3_5.TextConfig(**text),
            vision_config=qwen3_5.VisionConfig(model_type="qwen3_5", **vision),
            vocab_size=VOCABULARY,
            eos_token_id=[0],
        )
    )
    if bits is not None:
        nn.quantize(
            made.language_model,
            64,
            bits,
            class_predicate=lambda _, part: _is_wide(part),
        )
    mx.eval(made.parameters())
    return adapter_for("qwen3_5")(made)


def _is_wide(part: Any) -> bool:
    return isinstance(part, nn.Linear) and min(part.weight.shape) >= 64


def milliseconds(
    adapter: Adapter, layout: Placement, rows: int, count: int, steps: int
) -> float:
    """The least processor milliseconds of a forward, of whose positions each row keeps all but one."""
    shapes = FreeShapes(layout)
    trial = Trial(adapter, None, shapes)
    made = [trial.row(PROMPT + row, row) for row in range(rows)]
    layers = shapes.layers(made[0].restored(), rows)
    for layer in layers:
        layer.resize(rows)
    for place, row in enumerate(made):
        for layer, single in zip(layers, row.restored(), strict=True):
            layer.put(place, single)
    length, found = [row.encoded.length for row in made], []
    for step in range(steps + 2):
        counts = [1 if step < 2 else count] * rows
        drafted = counts[0] > 1
        tokens = mx.array(
            [3 + (5 * step + ahead) % 90 for ahead in range(counts[0])] * rows,
            dtype=mx.int32,
        )
        at = mx.array(
            [first + ahead for first in length for ahead in range(counts[0])],
            dtype=mx.int32,
        )
        begin = time.process_time()
        view: Any = [layer.drafted(counts) for layer in layers] if drafted else layers
        logits = adapter.decode(
            DecodeStep(tokens[:, None], at, view, [{}] * len(tokens)), Call()
        )
        mx.eval(mx.argmax(logits, axis=-1))
        kept = max(1, counts[0] - 1)
        for place in range(rows if drafted else 0):
            for layer in layers:
                layer.keep(place, kept, counts[place])
        found.append(time.process_time() - begin)
        length = [one + kept for one in length]
    return 1e3 * min(found[3:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--bits", type=int, default=None, help="of the weights; float32 without it"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--placement",
        choices=[layout.value for layout in Placement],
        default=Placement.for_device().value,
    )
    args = parser.parse_args()
    adapter, layout = model(args.layers, args.bits), Placement(args.placement)
    print(
        f"| rows | {' | '.join(map(str, POSITIONS))} |\n|{'---|' * (len(POSITIONS) + 1)}"
    )
    for rows in ROWS:
        cells = [
            f"{milliseconds(adapter, layout, rows, count, args.steps):.0f}"
            for count in POSITIONS
        ]
        print(f"| {rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
