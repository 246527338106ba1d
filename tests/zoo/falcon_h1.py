"""Falcon-H1, a text model: Mamba-2 and attention side by side in every layer."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models.falcon_h1 import config as upstream_config
from mlx_vlm.models.falcon_h1 import falcon_h1 as upstream

from ._build import Rule, enliven, spread, text_by_size, text_request
from ._oracle import generate_alone
from ._types import VOCABULARY, TinyFamily


def build() -> nn.Module:
    """Three layers of 64."""
    model = upstream.Model(
        upstream_config.ModelConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            mamba_d_head=8,
            mamba_d_ssm=32,
            mamba_d_state=8,
            mamba_n_heads=4,
            mamba_rms_norm=True,
            max_position_embeddings=1024,
            rope_theta=100.0,
            vocab_size=VOCABULARY,
            embedding_multiplier=1.0,
            lm_head_multiplier=1.0,
        )
    )
    head = "language_model.model.embed_tokens.weight"
    rules = [
        Rule(head, spread(0.4)),
        Rule(r"\.A_log$", spread(0.5, -0.5)),
        Rule(r"\.dt_bias$", spread(0.5, -1.0)),
        Rule(r"mamba\.D$", spread(0.3, 1.0)),
        Rule(r"mamba\.norm\.weight$", spread(0.2, 1.0)),
    ]
    enliven(model, seed=81, rules=rules, quiet=head)
    return model


FAMILY = TinyFamily(
    name="falcon_h1",
    build=build,
    text=text_request,
    image=text_by_size,
    two_images=None,
    no_two_images="a model without pictures",
    text_only=True,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step; transformers agrees (tests/references).",
)
