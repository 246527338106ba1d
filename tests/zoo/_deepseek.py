"""What the zoo's DeepSeek families share: settings of the text side, filling rules, and stand-ins for the OCR towers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ._build import Rule, Shape, fan_in, ids, pixels, spread, words
from ._types import PLAIN, VOCABULARY, Inputs

IMAGE = PLAIN
SIDE, PATCH = 2, 4  # features a side of a view, pixels a side of a feature

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
    Rule(r"image_newline$|view_separator$", spread(1.0)),
]


class Sam(nn.Module):
    """In the place of the SAM encoder, whose twelve layers of 768 are written into its caller: patches, projected."""

    def __init__(self, *, final_out_chans: int = 32, **sizes: Any) -> None:
        super().__init__()
        self.project = nn.Linear(3 * PATCH * PATCH, 32)

    def __call__(self, x: mx.array) -> mx.array:
        """(N, H, W, 3) -> (N, H / patch, W / patch, D)"""
        count, high, wide, _ = x.shape
        cells = x.reshape(count, high // PATCH, PATCH, wide // PATCH, PATCH, 3).transpose(0, 1, 3, 2, 4, 5)
        return self.project(cells.reshape(*cells.shape[:3], -1))


class Clip(nn.Module):
    """In the place of CLIP, whose 224 pixels are written into it: SAM's features with a class token before them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.project = nn.Linear(32, 32)

    def __call__(self, x: mx.array, patch_embeds: mx.array) -> mx.array:
        """(N, h, w, D) -> (N, 1 + h w, D)"""
        features = self.project(patch_embeds.flatten(1, 2))
        return mx.concatenate([features.mean(axis=1, keepdims=True), features], axis=1)


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
    view = SIDE * PATCH
    crops = pixels(seed, num_crops, 3, view, view) if num_crops else np.zeros((1, 3, view, view), dtype=np.float32)
    return {
        "input_ids": tokens,
        "pixel_values": [crops, pixels(seed + 31, len(tiles), 3, view, view)],
        "images_seq_mask": tokens == IMAGE,
        "images_spatial_crop": np.array([[wide, high] for high, wide in tiles], dtype=np.int32),
    }
