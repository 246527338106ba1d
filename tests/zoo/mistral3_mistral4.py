"""Mistral Small 4: latent attention, experts, and queries that grow with their position."""

from __future__ import annotations

import math
from typing import Any

import mlx.nn as nn
import numpy as np

from ._build import Rule, Shape
from ._oracle import generate_alone
from ._types import Inputs, Trace
from .mistral3 import build_with, tiny
from .mistral3_ministral3 import ROPE

#: Rotations as published (YaRN without a factor of its own for attention), over a length that short prompts exceed.
YARN: dict[str, Any] = {
    **ROPE,
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}


def _experts(random: np.random.RandomState, shape: Shape) -> np.ndarray:
    """(experts, outputs, inputs): each expert keeps the scale of its input."""
    return 1.3 / np.sqrt(shape[-1]) * random.standard_normal(shape)


def build() -> nn.Module:
    """The first layer dense, the others of four experts and a shared one."""
    return build_with(
        63,
        rules=[Rule(r"switch_mlp\.\w+_proj\.weight$", _experts)],
        model_type="mistral4",
        rope_parameters=YARN,
        rope_interleave=True,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        qk_head_dim=16,
        v_head_dim=12,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    )


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's own loop, with attention scaled as YaRN says for keys of which only a part is rotated.

    transformers, modeling_rope_utils.py, yarn_apply_mscale (DeepSeek-V2's rule). The norms of the latents have another
    epsilon there, too (modeling_mistral4.py, Mistral4RMSNorm).
    """
    factor = (0.1 * YARN["mscale_all_dim"] * math.log(YARN["factor"]) + 1) ** 2
    layers = model.language_model.layers
    for layer in layers:
        layer.self_attn.scale *= factor
        layer.self_attn.q_a_layernorm.eps = layer.self_attn.kv_a_layernorm.eps = 1e-6
    try:
        return generate_alone(model, inputs, num_tokens)
    finally:
        for layer in layers:
            layer.self_attn.scale /= factor
            layer.self_attn.q_a_layernorm.eps = layer.self_attn.kv_a_layernorm.eps = (
                1e-5
            )


FAMILY = tiny(
    "mistral3_mistral4",
    build,
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step with YaRN's factor on attention, which mlx-vlm leaves out; transformers agrees "
    "(tests/references).",
)
