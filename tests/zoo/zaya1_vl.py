"""ZAYA1-VL: compressed convolutional attention with its state, one expert or none a token, LoRA weights for pictures."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models.zaya1_vl import config as upstream_config
from mlx_vlm.models.zaya1_vl import zaya1_vl as upstream

from . import _qwen
from ._build import Rule, enliven, fan_in, per_expert, spread, text_request
from ._oracle import generate_alone
from ._types import END_OF_TEXT, VOCABULARY, Inputs, TinyFamily, Trace
from .qwen2_5_vl import image, two_images


def build() -> nn.Module:
    """Three blocks of 64; Qwen2.5-VL's vision tower with two blocks of 32, the first in windows."""
    model = upstream.Model(
        upstream_config.ModelConfig(
            image_token_id=_qwen.IMAGE,
            vision_start_token_id=_qwen.VISION_START,
            vision_end_token_id=_qwen.VISION_END,
            vocab_size=VOCABULARY,
            eos_token_id=END_OF_TEXT,
            text_config=upstream_config.TextConfig(
                vocab_size=VOCABULARY,
                hidden_size=64,
                ffn_hidden_size=96,
                num_hidden_layers=3,
                num_experts=4,
                num_attention_heads=4,
                head_dim=16,
                max_position_embeddings=1024,
                rope_theta=100.0,
                zaya_mlp_expansion=32,
                eos_token_id=END_OF_TEXT,
            ),
            vision_config=upstream_config.VisionConfig(
                model_type="qwen2_5_vl",
                depth=2,
                hidden_size=32,
                intermediate_size=64,
                out_hidden_size=64,
                num_heads=2,
                patch_size=_qwen.PATCH,
                spatial_patch_size=_qwen.PATCH,
                spatial_merge_size=_qwen.MERGE,
                temporal_patch_size=_qwen.TEMPORAL_PATCH,
                window_size=16,
                fullatt_block_indexes=[1],
            ),
        )
    )
    head = "language_model.model.embed_tokens.weight"
    rules = [
        Rule(head, spread(0.4)),
        Rule(r"(hidden_states|residual)_scale$", spread(0.2, 1.0)),
        Rule(r"(hidden_states|residual)_bias$", spread(0.2)),
        Rule(r"router_states_scale$", spread(0.2, 0.5)),
        Rule(r"balancing_biases$", spread(0.1)),
        Rule(r"\.temp$", spread(0.2, 1.0)),
        Rule(r"conv_qk\.\d\.weight$", spread(0.5)),
        # The head is the embedding: without strong layers a token would predict itself.
        Rule(r"\.linear_fc[12]\.weight$", per_expert(4.0)),
        Rule(r"self_attn\.o_proj\.weight$", fan_in(4.0)),
    ]
    enliven(model, seed=19, rules=rules, quiet=head)
    return model


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's loop in one chunk: in several it calls the model by a name that this one does not have."""
    return generate_alone(model, inputs, num_tokens, prefill_step_size=None)


FAMILY = TinyFamily(
    name="zaya1_vl",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step, unchunked: its chunks pass `inputs=` to a model that has no such name.",
    no_reference="transformers has the text model only; every scenario is compared with mlx-vlm alone",
)
