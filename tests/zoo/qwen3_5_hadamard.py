"""A Hadamard pack of Qwen3.5: 2-bit weights, whose inputs are turned by signed Walsh-Hadamard transforms."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.models import prism_hadamard_qwen35 as upstream
from mlx_vlm.models import qwen3_5
from mlx_vlm.models.prism_hadamard_qwen35.prism_hadamard_qwen35 import (
    hadamard_transform,
)

from vlm_batch.adapters.towers import embed_by_product
from vlm_batch.adapters.windows import attend_pictures

from . import _videos
from . import qwen3_5 as tiny
from ._build import enliven
from ._types import Inputs, Trace

#: The smallest block that a pack may have is 512, and a group of quantised weights 128.
TEXT: dict[str, Any] = {**tiny.TEXT, "hidden_size": 512}
VISION: dict[str, Any] = {**tiny.VISION, "out_hidden_size": 512}
BITS: dict[str, Any] = {"bits": 2, "group_size": 128, "mode": "affine"}


def configs() -> dict[str, Any]:
    """What the plain model and its pack have in common; fresh, because the configurations change what they are given."""
    text = qwen3_5.TextConfig(
        model_type="qwen3_5_text",
        intermediate_size=128,
        rope_parameters=tiny.rope(),
        **TEXT,
    )
    return {
        "text_config": text,
        "vision_config": qwen3_5.VisionConfig(**VISION),
        **tiny.MARKERS,
    }


def block_of(path: str) -> int:
    """The embedding and whatever reads the hidden state are turned in blocks of 512; ``down_proj`` is only quantised."""
    return 0 if path.endswith("down_proj") else 512


def is_packed(path: str, module: nn.Module) -> bool:
    """The head stays whole, so that markers can be kept from being generated."""
    narrow = (
        path.endswith(("o_proj", "out_proj"))
        or "in_proj_a" in path
        or "in_proj_b" in path
    )
    return (
        isinstance(module, (nn.Linear, nn.Embedding))
        and not narrow
        and path != "lm_head"
    )


def pack(path: str, weight: mx.array) -> dict[str, mx.array]:
    """The packed parameters of a module with a (rows, width) weight: its rows are turned as the input will be."""
    signs = mx.array(
        np.random.RandomState(zlib.crc32(path.encode()))
        .choice([-1.0, 1.0], size=weight.shape[1])
        .astype(np.float32)
    )
    block = block_of(path)
    turned = hadamard_transform(weight, block, signs) if block else weight
    quantised, scales, biases = mx.quantize(
        turned, group_size=BITS["group_size"], bits=BITS["bits"]
    )
    found = {
        "weight": quantised,
        "scales": scales.astype(mx.float16),
        "biases": biases.astype(mx.float16),
    }
    return {**found, "signs": signs} if block else found


def build() -> nn.Module:
    """Qwen3.5's four layers, wide enough for a block: 512. Norms and recurrent parameters are float32."""
    plain = qwen3_5.Model(qwen3_5.ModelConfig(model_type="qwen3_5", **configs()))
    enliven(plain, seed=39, rules=tiny.RULES, quiet=tiny.HEAD)
    weights: dict[str, mx.array] = dict(tree_flatten(plain.parameters()))  # type: ignore[arg-type]
    records = []
    for path, module in plain.language_model.named_modules():
        if not is_packed(path, module):
            continue
        is_embedding = isinstance(module, nn.Embedding)
        records.append(
            {
                "path": path,
                "embedding": is_embedding,
                "dtype": "float16",
                "block": block_of(path),
            }
        )
        whole = f"language_model.{path}"
        for name, value in pack(path, weights.pop(f"{whole}.weight")).items():
            weights[f"{whole}.{name}"] = value
    config = upstream.ModelConfig(
        model_type="prism_hadamard_qwen35",
        modules=records,
        quantization=dict(BITS),
        **configs(),
    )
    model = upstream.Model(config)
    model.load_weights(list(model.sanitize(weights).items()), strict=True)
    tower = model.vision_tower
    # in the adapter's bits: see ``greedy``
    tower.patch_embed.__class__ = embed_by_product(type(tower.patch_embed))
    for block in tower.blocks:
        block.attn.__class__ = attend_pictures(type(block.attn))
    model.eval()
    mx.eval(model.parameters())
    return model


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """As Qwen3.5's, with pictures and videos in one call of the tower, and so in the same bits as in a batch.

    The embeddings are float16, and so become the features that are put among them: what differs in the last bit of a
    float32 is now and then half a thousandth apart afterwards.
    """
    return _videos.greedy(model, inputs, num_tokens, _videos.encode_in_one_call)


FAMILY = replace(
    tiny.FAMILY,
    name="qwen3_5_hadamard",
    variant_of="qwen3_5",
    build=build,
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step with a clean language model; tests.zoo._videos where there is a video.",
    no_reference="transformers has no such class; the same code as qwen3_5, which is recorded, but for packed linear layers",
)
