"""GLM-4.1V: three-axis positions over half of each head, vision positions interpolated bicubically."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import glm4v as upstream

from . import _qwen
from ._build import Rule, enliven, fan_in, text_request
from ._oracle import generate_by_recomputing, to_mx
from ._qwen import image, two_images
from ._types import END_OF_TEXT, VOCABULARY, Inputs, TinyFamily, Trace

SIDE = 4  # learned vision positions per side
VISION_HEADS = 2
# Ten thousand times the real one, so that an epsilon fixed elsewhere in the code is seen.
VISION_EPS = 1e-2

MARKERS: dict[str, Any] = {
    **_qwen.MARKERS,
    "hidden_size": 64,
    "image_token_index": _qwen.IMAGE,
    "video_token_index": _qwen.VIDEO,
    "vision_end_token_id": _qwen.VISION_END,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_heads": VISION_HEADS,
    "patch_size": _qwen.PATCH,
    "image_size": _qwen.PATCH * SIDE,
    "rms_norm_eps": VISION_EPS,
    "out_hidden_size": 64,
    "spatial_merge_size": _qwen.MERGE,
    "temporal_patch_size": _qwen.TEMPORAL_PATCH,
}


def build() -> nn.Module:
    """Four layers of 64, two vision blocks of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="glm4v",
            **MARKERS,
            text_config=upstream.TextConfig(
                vocab_size=VOCABULARY,
                hidden_size=64,
                eos_token_id=[END_OF_TEXT],
                pad_token_id=END_OF_TEXT,
                intermediate_size=96,
                max_position_embeddings=1024,
                num_attention_heads=4,
                num_hidden_layers=4,
                num_key_value_heads=2,
                rope_theta=100.0,
                rope_scaling={"rope_type": "default", "mrope_section": [2, 1, 1]},
            ),
            vision_config=upstream.VisionConfig(model_type="glm4v", **VISION),
        )
    )
    head = "language_model.lm_head.weight"
    enliven(model, seed=9, rules=[Rule(head, fan_in(3.0))], quiet=head)
    return model


def four_images(seed: int) -> Inputs:
    """Four pictures: mlx-vlm's vision attention keeps only the first two apart."""
    return _qwen.request(
        seed, [_qwen.GRIDS[0], _qwen.GRIDS[1], _qwen.GRIDS[0], _qwen.GRIDS[1]]
    )


def _patch_positions(high: int, wide: int) -> np.ndarray:
    """(high * wide, 2) row and column of each patch, in the order of patches: merged block by merged block."""
    rows, columns = np.meshgrid(np.arange(high), np.arange(wide), indexing="ij")
    shape = (high // _qwen.MERGE, _qwen.MERGE, wide // _qwen.MERGE, _qwen.MERGE)
    return np.stack(
        [
            axis.reshape(shape).transpose(0, 2, 1, 3).reshape(-1)
            for axis in (rows, columns)
        ],
        axis=-1,
    )


def _bicubic_weights(offset: np.ndarray) -> np.ndarray:
    """(N, 4) weights of the taps -1, 0, 1, 2 for a point `offset` past tap 0: Keys' kernel with a = -0.75.

    Keys, "Cubic convolution interpolation for digital image processing" (1981); -0.75 is torch's choice.
    """
    a = -0.75
    distance = np.abs(offset[:, None] - np.array([-1, 0, 1, 2]))
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return np.where(distance <= 1, near, far)


def _interpolation(size: int, positions: np.ndarray) -> np.ndarray:
    """(N, SIDE) weights of the learned positions on one axis; taps beyond the edge count as the edge.

    transformers, modeling_glm4v.py, Glm4vVisionEmbeddings: grid_sample(bicubic, border, align_corners=False).
    """
    points = (positions + 0.5) / size * SIDE - 0.5
    first = np.floor(points).astype(int)
    weights = np.zeros((len(points), SIDE))
    for tap, column in zip(
        (-1, 0, 1, 2), _bicubic_weights(points - first).T, strict=True
    ):
        np.add.at(
            weights, (np.arange(len(points)), np.clip(first + tap, 0, SIDE - 1)), column
        )
    return weights


def _position_embedding(tower: nn.Module, high: int, wide: int) -> mx.array:
    """(high * wide, D)"""
    positions = _patch_positions(high, wide)
    rows = _interpolation(high, positions[:, 0])
    columns = _interpolation(wide, positions[:, 1])
    weights = (rows[:, :, None] * columns[:, None, :]).reshape(
        len(positions), SIDE * SIDE
    )
    return (
        mx.array(weights.astype(np.float32))
        @ tower.embeddings.position_embedding.weight
    )


def _rms(x: mx.array, norm: nn.Module) -> mx.array:
    """A norm of the vision tower with the epsilon of its configuration."""
    return (
        x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + VISION_EPS) * norm.weight
    )


def _vision_attention(
    attention: nn.Module, x: mx.array, positions: np.ndarray
) -> mx.array:
    """Over one picture's (N, D): half of the frequencies turn with the row, half with the column."""
    queries, keys, values = (
        attention.qkv(x).reshape(len(x), 3, VISION_HEADS, -1).transpose(1, 2, 0, 3)
    )
    quarter = queries.shape[-1] // 4
    frequencies = 10000.0 ** (-np.arange(quarter) / quarter)
    angles = mx.array(
        (positions[:, :, None] * frequencies).reshape(len(x), -1).astype(np.float32)
    )
    mixed = mx.fast.scaled_dot_product_attention(
        _turn(queries, angles)[None],
        _turn(keys, angles)[None],
        values[None],
        scale=queries.shape[-1] ** -0.5,
    )
    return attention.proj(mixed[0].transpose(1, 0, 2).reshape(len(x), -1))


def _turn(x: mx.array, angles: mx.array) -> mx.array:
    """Half-split rotation of (H, N, D) by (N, D / 2)."""
    half = x.shape[-1] // 2
    cos, sin, low, high = mx.cos(angles), mx.sin(angles), x[..., :half], x[..., half:]
    return mx.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _picture(tower: nn.Module, patches: mx.array, high: int, wide: int) -> mx.array:
    """(high * wide / 4, 64) features of one picture, which sees no other."""
    positions = _patch_positions(high, wide)
    hidden = _rms(
        tower.patch_embed(patches), tower.post_conv_layernorm
    ) + _position_embedding(tower, high, wide)
    for block in tower.blocks:
        hidden = hidden + _vision_attention(
            block.attn, _rms(hidden, block.norm1), positions
        )
        hidden = hidden + block.mlp(_rms(hidden, block.norm2))
    blocks = _rms(hidden, tower.post_layernorm).reshape(
        -1, _qwen.MERGE, _qwen.MERGE, hidden.shape[-1]
    )
    return tower.merger(tower.downsample(blocks).reshape(len(blocks), -1))


def _features(model: nn.Module, arrays: dict) -> mx.array:
    """(placeholders, 64) of all pictures in order."""
    grids = arrays["image_grid_thw"].tolist()
    ends = np.cumsum([high * wide for _, high, wide in grids])
    parts = mx.split(arrays["pixel_values"], ends[:-1].tolist())
    return mx.concatenate(
        [
            _picture(model.vision_tower, p, h, w)
            for p, (_, h, w) in zip(parts, grids, strict=True)
        ]
    )


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step, its positions counted from its first token."""
    arrays = to_mx(inputs)
    language = model.language_model
    prompt = language.model.embed_tokens(arrays["input_ids"])
    if "pixel_values" in arrays:
        holes = np.flatnonzero(np.array(arrays["input_ids"][0]) == _qwen.IMAGE)
        prompt[:, mx.array(holes)] = _features(model, arrays)[None]

    def logits(generated: list[int]) -> mx.array:
        tail = mx.array([generated], dtype=mx.int32)
        tokens = mx.concatenate([arrays["input_ids"], tail], axis=1)
        hidden = mx.concatenate([prompt, language.model.embed_tokens(tail)], axis=1)
        positions, _ = language.get_rope_index(tokens, arrays.get("image_grid_thw"))
        turned = language.model.rotary_emb(hidden, positions)
        for layer in language.model.layers:
            hidden = layer(hidden, "causal", None, turned)
        return language.lm_head(language.model.norm(hidden[:, -1]))[0]

    return generate_by_recomputing(logits, num_tokens)


FAMILY = TinyFamily(
    name="glm4v",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    also={"four_images": four_images},
    greedy=greedy,
    oracle_note="The whole sequence at each step over the model's own layers, and a vision tower written out here. "
    "mlx-vlm's tower interpolates positions bilinearly with zeros outside, fixes an epsilon and lets pictures from "
    "the third on see each other; its loop loses positions after the first chunk. transformers agrees with what "
    "is here (tests/references).",
)
