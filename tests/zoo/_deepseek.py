"""What the zoo's DeepSeek families share: settings of the text side, filling rules, and the OCR towers, small."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.deepseekocr.sam import SAMEncoder

from ._build import Rule, Shape, activated, fan_in, ids, pixels, spread, words
from ._types import PLAIN, VOCABULARY, Inputs

IMAGE = PLAIN
PATCH = 4
VIEW, CROP = 32, 20
"""Pixels a side. SAM's own is the view; positions are resized for crops, by SAM and by CLIP."""
SIDE = 2
"""Features a side, of views and of crops: 8 and 5 patches, halved twice and rounded up."""

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "rope_theta": 100.0,
    "max_position_embeddings": 512,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}


def heads(random: np.random.RandomState, shape: Shape) -> np.ndarray:
    """(heads or experts, outputs, inputs): each keeps the scale of its input."""
    return 1.3 / np.sqrt(shape[-1]) * random.standard_normal(shape)


HEAD = "language_model.lm_head.weight"
RULES = [
    Rule(HEAD, fan_in(3.0)),
    Rule(r"switch_mlp\.|embed_q\.|unembed_out\.", heads),
    Rule(r"\.gate\.weight$", fan_in(1.3)),
    Rule(r"e_score_correction_bias$", spread(0.2)),
    Rule(r"image_newline$|view_separator$|class_embedding$", spread(1.0)),
    Rule(r"sam_model\.(pos_embed$|blocks.*rel_pos)", spread(0.3)),
]


def sam(*, final_out_chans: int = 32, **sizes: Any) -> nn.Module:
    """Upstream's SAM encoder, whose sizes are written into its caller, small: a block with windows and one without."""
    small = SAMEncoder(
        img_size=VIEW, patch_size=PATCH, embed_dim=32, depth=2, num_heads=2, out_chans=16, window_size=3,
        global_attn_indexes=(1,),
    )  # fmt: skip
    small.net_2 = nn.Conv2d(16, 24, kernel_size=3, stride=2, padding=1, bias=False)
    small.net_3 = nn.Conv2d(24, 32, kernel_size=3, stride=2, padding=1, bias=False)
    return small


def clip(**facts: Any) -> dict[str, Any]:
    """The settings of a CLIP of two layers, whose 224 pixels are written into it: 4 x 4 positions."""
    sizes = {
        "layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "patch_size": 56,
    }
    return {"model_type": "vision", **sizes, **facts}


@contextmanager
def resized_as_published() -> Iterator[None]:
    """Positions for pictures of other sizes as torch resizes them, in place of mlx-vlm's."""
    with (
        mock.patch("mlx_vlm.models.deepseekocr.sam.get_rel_pos", _relative),
        mock.patch(
            "mlx_vlm.models.deepseekocr.vision.VisionEmbeddings._get_abs_pos", _resized
        ),
    ):
        yield


@contextmanager
def clip_as_published(model: nn.Module) -> Iterator[None]:
    """Besides, the epsilon of CLIP's norms and its activation."""
    layers = model.vision_model.transformer.layers
    norms = [
        norm for layer in layers for norm in (layer.layer_norm1, layer.layer_norm2)
    ]
    before = [norm.eps for norm in norms]
    with (
        resized_as_published(),
        activated([layer.mlp for layer in layers], QuickGELU(), "activation_fn"),
    ):
        try:
            for norm in norms:
                norm.eps = 1e-5
            yield
        finally:
            for norm, eps in zip(norms, before, strict=True):
                norm.eps = eps


class QuickGELU(nn.Module):
    """The approximation by a sigmoid."""

    def __call__(self, x: mx.array) -> mx.array:
        return x * mx.sigmoid(1.702 * x)


def _relative(q_size: int, k_size: int, table: mx.array) -> mx.array:
    """Linear, half a step in from the edges, which are repeated."""
    old, new = len(table), 2 * q_size - 1
    at = (np.arange(new) + 0.5) * old / new - 0.5
    values = np.array(table, dtype=np.float64)
    stretched = np.stack(
        [np.interp(at, np.arange(old), column) for column in values.T], axis=1
    )
    places = np.arange(q_size)[:, None] - np.arange(k_size) + q_size - 1
    return mx.array(stretched[places].astype(np.float32))


def _resized(embeddings: nn.Module, table: mx.array, length: int) -> mx.array:
    """Cubic with a = -0.5, as wide as the step when the grid shrinks; the weights of what lies inside add up to one."""
    values = np.array(table[0], dtype=np.float64)
    old, new = (math.isqrt(count - 1) for count in (len(values), length))
    step = old / new
    width = max(step, 1.0)
    far = np.abs(np.arange(old) + 0.5 - (np.arange(new)[:, None] + 0.5) * step) / width
    weights = np.where(
        far < 1,
        1.5 * far**3 - 2.5 * far**2 + 1,
        -0.5 * far**3 + 2.5 * far**2 - 4 * far + 2,
    )
    weights = np.where(far < 2, weights, 0)
    weights /= weights.sum(axis=1, keepdims=True)
    grid = np.einsum(
        "yY,xX,YXd->yxd", weights, weights, values[1:].reshape(old, old, -1)
    )
    return mx.array(
        np.concatenate([values[:1], grid.reshape(new * new, -1)]).astype(np.float32)
    )[None]


def num_features(high: int, wide: int) -> int:
    """Of a picture of high x wide tiles, as the processors count them: rows end in a newline, views in a separator."""
    crops = high * SIDE * (wide * SIDE + 1) if high * wide > 1 else 0
    return SIDE * (SIDE + 1) + 1 + crops


def ocr_request(seed: int, tiles: list[tuple[int, int]]) -> Inputs:
    """Pictures of (high, wide) tiles; a picture of one tile has no crops."""
    parts = [words(seed, 3)]
    for index, grid in enumerate(tiles):
        parts += [[IMAGE] * num_features(*grid), words(seed + 101 * (index + 1), 5)]
    tokens = ids(*parts)
    num_crops = sum(high * wide for high, wide in tiles if high * wide > 1)
    no_crops = np.zeros((1, 3, CROP, CROP), dtype=np.float32)
    crops = pixels(seed, num_crops, 3, CROP, CROP) if num_crops else no_crops
    return {
        "input_ids": tokens,
        "pixel_values": [crops, pixels(seed + 31, len(tiles), 3, VIEW, VIEW)],
        "images_seq_mask": tokens == IMAGE,
        "images_spatial_crop": np.array(
            [[wide, high] for high, wide in tiles], dtype=np.int32
        ),
    }
