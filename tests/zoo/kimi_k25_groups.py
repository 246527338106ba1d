"""Kimi K2.5 with two groups of experts, of which a token's are in one, as in DeepSeek-V3."""

from __future__ import annotations

from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.deepseek_v3 import language

from . import _kimi
from ._build import text_request
from ._types import Inputs, TinyFamily, Trace
from .kimi_k25 import made


def build() -> nn.Module:
    """Eight experts in two groups; biases near -1, so that choices are often of less than zero."""
    model = made(seed=62, n_routed_experts=8, n_group=2, topk_group=1)
    for layer in model.language_model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias = (
            layer.mlp.gate.e_score_correction_bias - 0.8
        )
    mx.eval(model.parameters())
    return model


def select(
    gates: mx.array,
    bias: mx.array,
    top_k: int,
    groups: int,
    kept: int,
    scale: float,
    normed: bool,
) -> tuple[mx.array, mx.array]:
    """The published choice of experts (transformers, modeling_deepseek_v3.py:132-160), by sorting."""
    scores = mx.sigmoid(gates)
    grouped = mx.unflatten(scores + bias, -1, (groups, -1))
    ranks = mx.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
    least = mx.sort(ranks, axis=-1)[..., -kept, None]
    choice = mx.where((ranks >= least)[..., None], grouped, -mx.inf).flatten(-2)
    experts = mx.argsort(-choice, axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, experts, axis=-1)
    return experts, scale * (
        weights / weights.sum(axis=-1, keepdims=True) if normed else weights
    )


def greedy(model: Any, inputs: Inputs, num_tokens: int) -> Trace:
    """As Kimi K2.5's, with the published choice of experts."""
    with mock.patch.object(language, "group_expert_select", select):
        return _kimi.greedy(model, inputs, num_tokens)


FAMILY = TinyFamily(
    name="kimi_k25_groups",
    variant_of="kimi_k25",
    build=build,
    text=text_request,
    image=_kimi.image,
    two_images=_kimi.two_images,
    wrong_alone=("text", "image_2"),
    greedy=greedy,
    oracle_note="kimi_k25's, with the published choice of experts; transformers agrees (tests/references).",
)
