"""GLM-5-Next: delta nets, sparse attention over pools of keys chosen by an indexer, four streams mixed by every layer."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import glm5_next as upstream

from . import _qwen
from ._build import Rule, enliven, fan_in, per_expert, spread, text_request
from ._oracle import generate_alone
from ._qwen import image, two_images
from ._types import END_OF_TEXT, VOCABULARY, TinyFamily


def build() -> nn.Module:
    """Four layers of 64: delta nets and sparse attention in turn, experts in all but the first; two vision blocks of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            image_token_id=_qwen.IMAGE,
            video_token_id=_qwen.VIDEO,
            image_start_token_id=_qwen.VISION_START,
            image_end_token_id=_qwen.VISION_END,
            video_start_token_id=_qwen.VIDEO + 1,
            video_end_token_id=_qwen.VIDEO + 2,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=96,
                moe_intermediate_size=32,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=4,
                n_routed_experts=4,
                num_experts_per_tok=2,
                routed_scaling_factor=1.5,
                kv_lora_rank=16,
                q_lora_rank=24,
                v_head_dim=16,
                qk_nope_head_dim=16,
                max_position_embeddings=1024,
                pad_token_id=None,
                layer_types=["linear_attention", "deepseek_sparse_attention"] * 2,
                indexer_types=["full", "full", "full", "full"],
                first_k_dense_replace=1,
                index_topk=6,
                index_kpool=2,
                index_head_dim=16,
                # of fewer, some pools have no score at all, and which of them are taken is chance
                index_n_heads=16,
                linear_head_dim=8,
                linear_num_heads=4,
                hc_mult=2,
            ),
            vision_config=upstream.VisionConfig(
                depth=2,
                hidden_size=32,
                num_heads=2,
                patch_size=_qwen.PATCH,
                spatial_merge_size=_qwen.MERGE,
                temporal_patch_size=_qwen.TEMPORAL_PATCH,
                out_hidden_size=64,
                intermediate_size=64,
                projection_intermediate_size=64,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(2.3)),
        Rule(r"(fbg_a|f_b)_proj\.weight$", fan_in(0.7)),
        Rule(r"\.A_log$", spread(0.5, -0.5)),
        Rule(r"\.dt_bias$", spread(0.5, -2.0)),
        Rule(r"\.(embed_q|unembed_out)\.weight$", per_expert(1.3)),
        Rule(r"gate\.weight$|compress_gate$", fan_in(1.3)),
        Rule(r"e_score_correction_bias$", spread(0.1)),
        Rule(r"compress_ape$", spread(0.5)),
        Rule(r"merger\.down_proj", fan_in(0.5)),
        Rule(r"_hc\.fn$", fan_in(0.25)),
        Rule(r"_hc\.(base|scale)$", spread(0.3, 0.5)),
    ]
    enliven(model, seed=96, rules=rules, quiet=head)
    return model


FAMILY = TinyFamily(
    name="glm5_next",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    window=6,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step; transformers agrees (tests/references).",
)
