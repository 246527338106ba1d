"""GLM-4.5V: GLM-4.1V's tower and positions over a text model with grouped experts and a shared one."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import glm4v_moe as upstream

from ._build import Rule, enliven, fan_in, spread, text_request
from ._qwen import image, two_images
from ._types import VOCABULARY, TinyFamily
from .glm4v import MARKERS, VISION, four_images, greedy


def build() -> nn.Module:
    """Four layers of 64, the first dense; two vision blocks of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="glm4v_moe",
            **MARKERS,
            text_config=upstream.TextConfig(
                model_type="glm4v_moe_text",
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=96,
                moe_intermediate_size=48,
                max_position_embeddings=1024,
                norm_topk_prob=True,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                n_group=1,
                topk_group=1,
                n_shared_experts=1,
                n_routed_experts=4,
                num_experts_per_tok=2,
                routed_scaling_factor=1.5,
                first_k_dense_replace=1,
                num_hidden_layers=4,
                rms_norm_eps=1e-5,
                use_qk_norm=False,
                attention_bias=True,
                partial_rotary_factor=0.5,
                rope_theta=100.0,
                rope_scaling={"rope_type": "default", "mrope_section": [2, 1, 1]},
            ),
            vision_config=upstream.VisionConfig(model_type="glm4v_moe", **VISION),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"mlp\.gate\.weight", fan_in(1.3)),
        Rule(r"e_score_correction_bias", spread(0.1)),
    ]
    enliven(model, seed=45, rules=rules, quiet=head)
    return model


FAMILY = TinyFamily(
    name="glm4v_moe",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    also={"four_images": four_images},
    greedy=greedy,
    oracle_note="As GLM-4.1V: the whole sequence at each step over the model's own layers, and a vision tower written out "
    "there. mlx-vlm's tower interpolates positions bilinearly with zeros outside and fixes an epsilon; its loop "
    "loses positions after the first chunk. transformers agrees with what is here (tests/references).",
)
