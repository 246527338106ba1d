"""Recordings in a batch: python -m benchmarks.recordings [FAMILY ...] [--recordings 48] [--seconds 10] [--clock cpu]

Each request is a recording of its own (a FLAC file of a CD's rate and channels) and a question, answered with the same
number of tokens. The models are the families' tiny ones (``tests.zoo``) made wide: decoders of about 30 M parameters and
encoders of sound of 1 to 5 M, with random weights. Ways in turns, in one process: all requests at once, each when the one
before has ended, and mlx-vlm's ``BatchGenerator`` as its server feeds it, with its defaults. Greedy, so all must give the
same tokens, which are compared. Reading files, spectrograms and text are part of it. No tokens are drafted: random weights
repeat themselves, which drafts would answer for next to nothing, and a transcript does not. The last line is JSON.

``--stages`` says instead where the time of one request goes, alone: file, processor, encoder, prompt, one token.
"""

from __future__ import annotations

from vlm_batch.runtime import blas

blas.preload_openblas()  # before anything imports mlx.core

import argparse  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import re  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from dataclasses import is_dataclass, replace  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
import soundfile  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

from tests import hearing  # noqa: E402
from tests.zoo import family  # noqa: E402
from vlm_batch import Request, SamplingParams, VLMBatcher  # noqa: E402
from vlm_batch.adapters.base import Adapter  # noqa: E402
from vlm_batch.arrays import as_mlx  # noqa: E402
from vlm_batch.inputs.audio import load_audio  # noqa: E402
from vlm_batch.inputs.processing import Processing  # noqa: E402
from vlm_batch.loading import adapt  # noqa: E402

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
SEED, RATE, PROMPT = 7, 44_100, "what?"
#: Of each engine: nothing is kept for later requests, and nothing drafted.
PLAIN: dict[str, Any] = {"caches": None, "policy": {"draft": "off"}}
WHISPER = {
    "d_model": 256,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 1024,
    "encoder_layers": 2,
}
CONFORMER = {"hidden_size": 256}
#: What is wider than in the tiny models, by the part of the configuration, and as the published models have it where it
#: is no width: bands, windows, features of a recording.
WIDE: Mapping[str, Mapping[str, Any]] = {
    "gemma3n": {
        "hidden_size": 768,
        "audio_soft_tokens_per_image": 188,
        "text_config": {
            "hidden_size": 768,
            "intermediate_size": [2304] * 5,
            "num_attention_heads": 12,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "sliding_window": 512,
        },
        "audio_config": {
            **CONFORMER,
            "input_feat_size": 128,
            "conf_num_attention_heads": 4,
            "conf_attention_chunk_size": 12,
            "conf_attention_context_left": 13,
            "sscp_conv_channel_size": (64, 16),
        },
    },
    "gemma4": {
        "text_config": {
            "hidden_size": 768,
            "intermediate_size": 2304,
            "num_attention_heads": 12,
            "head_dim": 64,
            "global_head_dim": 64,
            "sliding_window": 512,
        },
        "audio_config": {
            **CONFORMER,
            "num_attention_heads": 4,
            "attention_chunk_size": 12,
            "attention_context_left": 13,
            "output_proj_dims": 256,
        },
    },
    "minicpmo": {
        "audio_chunk_length": 1.0,
        "text_config": {
            "hidden_size": 768,
            "intermediate_size": 2304,
            "num_attention_heads": 12,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "rope_scaling": {"type": "default", "mrope_section": [12, 10, 10]},
        },
        "audio_config": WHISPER,
    },
    "qwen3_omni_moe": {
        "thinker_config": {
            "text_config": {
                "hidden_size": 768,
                "intermediate_size": 2304,
                "moe_intermediate_size": 768,
                "num_attention_heads": 12,
                "num_key_value_heads": 3,
                "head_dim": 64,
                "rope_scaling": {"type": "default", "mrope_section": [12, 10, 10]},
            },
            "vision_config": {"out_hidden_size": 768},
            "audio_config": {
                **WHISPER,
                "num_hidden_layers": 2,
                "num_mel_bins": 128,
                "output_dim": 768,
                "downsample_hidden_size": 64,
                "n_window_infer": 800,
            },
        },
    },
}
PROCESSORS: Mapping[str, Callable[[], Any]] = {
    "gemma3n": lambda: hearing.gemma3n("gemma3n", bands=128, places=188),
    "gemma4": lambda: hearing.gemma("gemma4"),
    "minicpmo": lambda: hearing.minicpmo("minicpmo"),
    "qwen3_omni_moe": lambda: hearing.qwen("qwen3_omni_moe", bands=128),
}


class NoTower(nn.Module):
    """Gemma 3n's tower for pictures cannot be made small."""

    def __init__(self, config: Any) -> None:
        super().__init__()


def wide_model(name: str) -> Any:
    """A family's tiny model with wider layers, its weights drawn as the tiny one's are spread."""
    tiny: Any = family(name).build()
    with mock.patch.multiple("mlx_vlm.models.gemma3n.gemma3n", VisionModel=NoTower):
        made = type(tiny)(widened(tiny.config, WIDE[name]))
    known = dict(flat(tiny.parameters()))
    random, weights = np.random.default_rng(SEED), []
    for path, value in flat(made.parameters()):
        twin = np.array(
            known[path] if path in known else known[re.sub(r"\.\d+\.", ".0.", path)]
        )
        narrower = np.prod(twin.shape[1:]) / np.prod(value.shape[1:])
        drawn = twin.mean() + twin.std() * narrower**0.5 * random.standard_normal(
            value.shape
        )
        weights.append((path, mx.array(drawn.astype(np.float32))))
    made.load_weights(weights, strict=False)
    made.eval()
    mx.eval(made.parameters())
    return made


def flat(tree: Any) -> list[tuple[str, mx.array]]:
    """The arrays of a tree with their paths."""
    leaves: Any = tree_flatten(tree)
    return [(path, value) for path, value in leaves if isinstance(value, mx.array)]


def widened(config: Any, sizes: Mapping[str, Any]) -> Any:
    """A configuration with other sizes, in its parts too."""
    return replace(
        config,
        **{
            name: widened(getattr(config, name), value)
            if is_dataclass(getattr(config, name))
            else value
            for name, value in sizes.items()
        },
    )


def recordings(count: int, seconds: float) -> list[bytes]:
    """Files of noise under a tone, as stereo of a CD."""
    random = np.random.default_rng(SEED)
    times = np.arange(int(seconds * RATE)) / RATE
    found = []
    for at in range(count):
        tone = 0.3 * np.sin(2 * np.pi * (200 + 20 * at) * times)[:, None]
        file = io.BytesIO()
        soundfile.write(
            file,
            tone + 0.05 * random.standard_normal((len(times), 2)),
            RATE,
            format="FLAC",
        )
        found.append(file.getvalue())
    return found


Answers = list[tuple[int, ...]]


def at_once(
    batcher: VLMBatcher, files: Sequence[bytes], params: SamplingParams
) -> Answers:
    """The answers' tokens to requests that come together."""
    handles = [
        batcher.submit(prompt=PROMPT, audios=file, params=params) for file in files
    ]
    return [handle.result().raise_for_error().token_ids for handle in handles]


def one_by_one(
    batcher: VLMBatcher, files: Sequence[bytes], params: SamplingParams
) -> Answers:
    """The answers' tokens to requests of which each waits for the one before."""
    return [at_once(batcher, [file], params)[0] for file in files]


def served(
    model: Any, processor: Any, rendered: str, files: Sequence[bytes], tokens: int
) -> Answers:
    """mlx-vlm's own reading, processor and embeddings of each request, and its batch of them."""
    from mlx_vlm.utils import prepare_inputs

    from benchmarks.compare.engines import mlx_vlm_defaults
    from benchmarks.compare.workloads import Workload

    engine = mlx_vlm_defaults(model, Workload("", "", [], rows=32))
    found: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for at, file in enumerate(files):
            path = Path(folder) / f"{at}.flac"
            path.write_bytes(file)
            inputs = dict(
                prepare_inputs(
                    processor,
                    prompts=rendered,
                    audio=[str(path)],
                    add_special_tokens=False,
                )
            )
            ids, pixels, mask = (
                inputs.pop(name, None)
                for name in ("input_ids", "pixel_values", "attention_mask")
            )
            features = model.get_input_embeddings(
                ids, pixels, mask=mask, **inputs
            ).to_dict()
            keywords = {
                **inputs,
                **{
                    name: value for name, value in features.items() if value is not None
                },
            }
            (uid,) = engine.generator.insert(
                [ids[0].tolist()], max_tokens=tokens, prompt_kwargs=[keywords]
            )
            engine.names[uid] = str(at)
        while sum(map(len, found.values())) < tokens * len(files):
            for name, token in engine.step():
                found.setdefault(name, []).append(token)
    engine.close()
    return [tuple(found[str(at)]) for at in range(len(files))]


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A family's ratios."""
    clock, model = CLOCKS[args.clock], wide_model(name)
    files = recordings(args.recordings, args.seconds)
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    with (
        VLMBatcher(
            model, PROCESSORS[name](), max_rows=args.recordings, **PLAIN
        ) as wide,
        VLMBatcher(model, PROCESSORS[name](), max_rows=1, **PLAIN) as narrow,
    ):
        rendered = narrow.rendered(Request(prompt=PROMPT, audios=files[:1])) or PROMPT
        theirs = PROCESSORS[name]()
        ways: dict[str, Callable[[Sequence[bytes]], Answers]] = {
            "in a batch": lambda some: at_once(wide, some, params),
            "one after another": lambda some: one_by_one(narrow, some, params),
            "mlx-vlm's server": lambda some: served(
                model, theirs, rendered, some, args.tokens
            ),
        }
        if args.ours:
            del ways["mlx-vlm's server"]
        answers: dict[str, Answers] = {}
        seconds: dict[str, list[float]] = {}
        for some in (files[:2], *[files] * args.rounds):
            for way, ask in list(ways.items()):
                began = clock()
                try:
                    answers[way] = ask(some)
                except Exception as error:  # mlx-vlm's
                    print(f"{name}: {way} raises {type(error).__name__}: {error}")
                    del ways[way]
                    continue
                if some is files:
                    seconds.setdefault(way, []).append(clock() - began)
                    print(f"{name}: {way} {seconds[way][-1]:.1f} s", flush=True)
    alone = answers["one after another"]
    right = {
        way: sum(one == other for one, other in zip(found, alone, strict=True))
        for way, found in answers.items()
        if way in ways
    }
    ratio = {
        way: statistics.median(
            ours / theirs
            for ours, theirs in zip(seconds["in a batch"], seconds[way], strict=True)
        )
        for way in ways
        if way != "in a batch"
    }
    kinds = len(set(alone))
    size = sum(value.size for _, value in flat(model.parameters())) / 1e6
    print(
        f"{name} ({size:.0f} M):",
        "; ".join(
            f"{way} {statistics.median(seconds[way]):.1f} s, {right[way]} as alone"
            for way in ways
        ),
        f"; {kinds} answers differ;",
        ", ".join(f"{value:.2f} of {way}" for way, value in ratio.items()),
        flush=True,
    )
    return {"seconds": seconds, "ratio": ratio, "as_alone": right}


def encoded(adapter: Adapter, inputs: Mapping[str, Any]) -> mx.array:
    """A request's embeddings, recordings in their places."""
    return adapter.encode(as_mlx(dict(inputs))).inputs_embeds


def stages(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of one request's parts, the best of some: each evaluated before the next begins."""
    clock, found = CLOCKS[args.clock], dict[str, float]()
    model = wide_model(name)
    adapter = adapt(model)
    made = Processing(adapter.processor(PROCESSORS[name]()), adapter.config)
    rate, rendered = made.audio_rate or RATE, made.render(PROMPT, 0, 0, 1)
    with VLMBatcher(model, PROCESSORS[name](), max_rows=1, **PLAIN) as batcher:

        def timed(stage: str, call: Callable[[], Any]) -> Any:
            began = clock()
            result = call()
            mx.eval([value for _, value in flat(result)])
            found[stage] = min(1000 * (clock() - began), found.get(stage, np.inf))
            return result

        for file in recordings(args.rounds, args.seconds):
            sound = timed("file", partial(load_audio, file, rate))
            inputs = timed("processor", partial(made.inputs, rendered, [], [], [sound]))
            timed("encoder", partial(encoded, adapter, inputs))
        for tokens in (1, args.tokens):
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            for file in recordings(args.rounds, args.seconds):
                timed(f"{tokens} tokens", partial(at_once, batcher, [file], params))
    print(name, {stage: round(value, 1) for stage, value in found.items()}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "families",
        nargs="*",
        default=list(WIDE),
        metavar="FAMILY",
        help=f"default: {', '.join(WIDE)}",
    )
    parser.add_argument("--recordings", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--ours", action="store_true", help="without mlx-vlm")
    parser.add_argument(
        "--stages", action="store_true", help="take one request apart instead"
    )
    args = parser.parse_args()
    blas.limit_threads(1)
    found = {
        name: (stages if args.stages else compare)(name, args) for name in args.families
    }
    said = {name: value for name, value in vars(args).items() if name != "families"}
    print(json.dumps({**said, "device": str(mx.default_device()), "found": found}))


if __name__ == "__main__":
    main()
