"""This library's batch against mlx-vlm one request after another: python benchmarks/batch_vs_single.py [--help]

N requests, each a picture (sizes vary) and a question, all answered with the same number of tokens. Three ways in one run:
mlx-vlm's own ``generate_step`` one after another, this library with one row, this library with N rows. Greedy, so all
three must give the same tokens, which is checked. Pictures are processed and text is decoded in each. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vlm_batch import Request, SamplingParams, VLMBatcher
from vlm_batch.assets import default_checkpoint, sample_images
from vlm_batch.runtime import blas

#: The medium model: the embedded checkpoint's architecture with these sizes and random weights, 37 M parameters.
MEDIUM_TEXT = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
}
MEDIUM_VISION = {"depth": 4, "embed_dim": 256, "hidden_size": 512, "num_heads": 4}
SEED = 7
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def load(name: str) -> tuple[Any, Any]:
    """(model, processor): "tiny" is the embedded checkpoint, "medium" the random one, anything else a path or hub id."""
    import mlx.core as mx
    import mlx_vlm
    from mlx_vlm.models import qwen2_vl

    if name not in ("tiny", "medium"):
        return mlx_vlm.load(name)
    model, processor = mlx_vlm.load(str(default_checkpoint()))
    if name == "medium":
        stored = json.loads(
            (default_checkpoint() / "config.json").read_text(encoding="utf-8")
        )
        vision = {**stored["vision_config"], **MEDIUM_VISION}
        config = qwen2_vl.ModelConfig.from_dict(
            {**stored, **MEDIUM_TEXT, "vision_config": vision}
        )
        config.text_config = qwen2_vl.TextConfig.from_dict(config.text_config)
        config.vision_config = qwen2_vl.VisionConfig.from_dict(config.vision_config)
        mx.random.seed(SEED)
        model = qwen2_vl.Model(config)
    if mx.default_device().type == mx.DeviceType.cpu:
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, processor


Answers = list[tuple[int, ...]]


def one_after_another(
    model: Any, processor: Any, pictures: Sequence[Path], prompt: str, num_tokens: int
) -> Answers:
    """mlx-vlm's own single-request path."""
    from mlx_vlm.generate import generate_step
    from mlx_vlm.prompt_utils import apply_chat_template
    from mlx_vlm.utils import prepare_inputs

    answers = []
    for picture in pictures:
        rendered = apply_chat_template(processor, model.config, prompt, num_images=1)
        inputs = dict(
            prepare_inputs(processor, images=[str(picture)], prompts=rendered)
        )
        ids = inputs.pop("input_ids")
        pixels = inputs.pop("pixel_values")
        mask = inputs.pop("attention_mask", None)
        steps = generate_step(
            ids, model, pixels, mask, max_tokens=num_tokens, temperature=0.0, **inputs
        )
        answers.append(tuple(int(token) for token, _ in steps)[:num_tokens])
        processor.tokenizer.decode(list(answers[-1]))
    return answers


def in_a_batch(
    batcher: VLMBatcher, pictures: Sequence[Path], prompt: str, num_tokens: int
) -> Answers:
    """The same requests through the batcher."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    requests = [
        Request(images=[picture], prompt=prompt, params=params) for picture in pictures
    ]
    return [
        result.token_ids for result in batcher.generate(requests, raise_on_error=True)
    ]


def measure(
    ways: Sequence[Callable[[], Answers]], repeats: int, clock: Callable[[], float]
) -> tuple[list[float], list[Answers]]:
    """(median seconds of each way, its answers). The ways take turns, so that a busy machine is busy for all of them."""
    answers = [way() for way in ways]  # the first call warms up
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats):
        for way, taken in zip(ways, seconds, strict=True):
            began = clock()
            way()
            taken.append(clock() - began)
    return [statistics.median(taken) for taken in seconds], answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="medium",
        help="tiny, medium, a path or a hub id (default: medium)",
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8],
        help="sizes of the batch (default: 1 2 4 8)",
    )
    parser.add_argument(
        "--tokens", type=int, default=64, help="tokens of each answer (default: 64)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="timed runs of each, of which the median counts",
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: processor seconds, for a CPU that others are using",
    )
    parser.add_argument("--prompt", default="describe the picture")
    args = parser.parse_args()
    blas.limit_threads(max(1, (os.cpu_count() or 1) // 2))

    model, processor = load(args.model)
    samples = sample_images()
    print(
        f"{args.model}: {args.tokens} tokens each; {args.clock} seconds (ratio to mlx-vlm one after another)"
    )
    print(
        f"{'requests':>8} {'mlx-vlm':>9} {'one row':>16} {'all rows':>16} {'tokens/s':>9}  same tokens"
    )
    found = []
    for rows in args.rows:
        pictures = [samples[index % len(samples)] for index in range(rows)]
        asked = (pictures, args.prompt, args.tokens)
        with (
            VLMBatcher(model, processor, max_rows=1) as narrow,
            VLMBatcher(model, processor, max_rows=rows) as wide,
        ):
            ways = (
                partial(one_after_another, model, processor, *asked),
                partial(in_a_batch, narrow, *asked),
                partial(in_a_batch, wide, *asked),
            )
            (single, alone, together), answers = measure(
                ways, args.repeats, CLOCKS[args.clock]
            )
        same = all(answer == answers[0] for answer in answers)
        rate = rows * args.tokens / together
        print(
            f"{rows:>8} {single:>9.3f} {alone:>8.3f} ({single / alone:4.2f}x) {together:>8.3f} ({single / together:4.2f}x)"
            f" {rate:>9.0f}  {'yes' if same else 'NO'}"
        )
        found.append(
            {
                "requests": rows,
                "mlx_vlm": single,
                "one_row": alone,
                "all_rows": together,
                "same": same,
            }
        )
    print(
        json.dumps(
            {
                "model": args.model,
                "clock": args.clock,
                "tokens": args.tokens,
                "seconds": found,
            }
        )
    )


if __name__ == "__main__":
    main()
