"""Qwen3-Next, a text model: gated delta nets and attention in turn, experts in every layer."""

from __future__ import annotations

from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.qwen3_next import config as upstream_config
from mlx_vlm.models.qwen3_next import qwen3_next as upstream

from ._build import Rule, enliven, fan_in, spread, text_by_size, text_request
from ._oracle import generate_alone
from ._types import VOCABULARY, Inputs, TinyFamily, Trace


def build() -> nn.Module:
    """Four layers of 64: two recurrent, two with attention."""
    model = upstream.Model(
        upstream_config.ModelConfig(
            model_type="qwen3_next",
            hidden_size=64,
            num_hidden_layers=4,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            shared_expert_intermediate_size=48,
            mlp_only_layers=[],
            moe_intermediate_size=48,
            norm_topk_prob=True,
            rms_norm_eps=1e-6,
            vocab_size=VOCABULARY,
            rope_theta=100.0,
            partial_rotary_factor=0.5,
            max_position_embeddings=1024,
            full_attention_interval=2,
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"\.A_log$", spread(0.5, -0.5)),
        Rule(r"\.dt_bias$", spread(0.5, -2.0)),
        Rule(r"in_proj_ba", fan_in(0.7)),
        Rule(r"linear_attn\.norm\.weight", spread(0.2, 1.0)),
    ]
    enliven(model, seed=80, rules=rules, quiet=head)
    return model


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's loop, with the published place of the L2 norms' epsilon: their sum, not their mean."""
    right = mx.fast.rms_norm

    def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
        return right(x, weight, eps / x.shape[-1] if weight is None else eps)

    with mock.patch.object(mx.fast, "rms_norm", rms_norm):
        return generate_alone(model, inputs, num_tokens)


FAMILY = TinyFamily(
    name="qwen3_next",
    build=build,
    text=text_request,
    image=text_by_size,
    two_images=None,
    no_two_images="a model without pictures",
    text_only=True,
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step with the published L2 norms; transformers agrees (tests/references).",
)
