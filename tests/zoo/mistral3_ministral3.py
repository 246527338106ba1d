"""Ministral 3: queries grow with their position beyond the length that the text model was first trained for."""

from __future__ import annotations

import mlx.nn as nn

from .mistral3 import build_with, tiny

#: Small, so that short prompts are scaled: 1 + beta * log(1 + floor(position / LENGTH)).
LENGTH, BETA = 8, 0.5
ROPE = {
    "type": "default",
    "rope_type": "default",
    "rope_theta": 100.0,
    "llama_4_scaling_beta": BETA,
    "original_max_position_embeddings": LENGTH,
}


def build() -> nn.Module:
    """Full layers throughout, as in the published checkpoints."""
    return build_with(
        62,
        model_type="ministral3",
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters=ROPE,
    )


FAMILY = tiny("mistral3_ministral3", build)
