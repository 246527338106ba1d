"""Kimi K3: delta attention, latent attention without positions, experts in a latent space, residuals over blocks."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.nn as nn
import numpy as np
from mlx_vlm.models.kimi_k3 import config as upstream_config
from mlx_vlm.models.kimi_k3 import kimi_k3 as upstream

from ._build import (
    Rule,
    asks,
    enliven,
    fan_in,
    ids,
    per_expert,
    pixels,
    spread,
    text_request,
    words,
)
from ._oracle import generate_alone
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

PATCH = 4
IMAGE, START, END = PLAIN, PLAIN + 1, PLAIN + 2
GRIDS = ((4, 4), (4, 6), (6, 8))
Grid = tuple[int, int]


def build() -> nn.Module:
    """Four layers of 64: delta and latent attention in turn, experts in all but the first; two vision blocks of 32."""
    model = upstream.Model(
        upstream_config.ModelConfig(
            vocab_size=VOCABULARY,
            media_placeholder_token_id=IMAGE,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream_config.TextConfig(
                vocab_size=VOCABULARY,
                hidden_size=64,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=4,
                intermediate_size=96,
                max_position_embeddings=1024,
                linear_attn_config={
                    "kda_layers": [1, 3],
                    "full_attn_layers": [2, 4],
                    "num_heads": 4,
                    "head_dim": 8,
                    "short_conv_kernel_size": 4,
                },
                attn_res_block_size=2,
                q_lora_rank=24,
                kv_lora_rank=16,
                qk_nope_head_dim=12,
                qk_rope_head_dim=4,
                v_head_dim=12,
                mla_use_output_gate=True,
                num_experts=4,
                num_experts_per_token=2,
                num_shared_experts=1,
                moe_intermediate_size=48,
                first_k_dense_replace=1,
                routed_expert_hidden_size=32,
                latent_moe_use_norm=True,
            ),
            vision_config=upstream_config.VisionConfig(
                patch_size=PATCH,
                init_pos_emb_height=4,
                init_pos_emb_width=4,
                vt_num_attention_heads=2,
                vt_num_hidden_layers=2,
                vt_hidden_size=32,
                vt_intermediate_size=64,
                qkv_hidden_size=32,
                mm_hidden_size=32,
                text_hidden_size=64,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(2.6)),
        Rule(r"\.A_log$", spread(0.5, -0.5)),
        Rule(r"\.dt_bias$", spread(0.5, -2.0)),
        Rule(r"self_attn\.(b_proj|f_b_proj)\.weight$", fan_in(0.7)),
        Rule(r"\.(embed_q|unembed_out)\.weight$", per_expert(1.3)),
        # peaked, the mixture over blocks would magnify rounding
        Rule(r"_res_proj\.weight$", fan_in(0.3)),
        Rule(r"e_score_correction_bias$", spread(0.1)),
        Rule(r"pos_emb\.weight$", spread(0.5)),
    ]
    enliven(model, seed=31, rules=rules, quiet=head)
    return model


def request(seed: int, grids: Sequence[Grid]) -> Inputs:
    """Words, then each picture between its markers followed by words; patches are (patches, channels, high, wide)."""
    parts = [words(seed, 3)]
    for index, (high, wide) in enumerate(grids):
        parts += [
            [START, *[IMAGE] * (high * wide // 4), END],
            words(seed + 101 * (index + 1), 4 + index),
        ]
    flat = [
        pixels(seed + 31 * i, high * wide, 3, PATCH, PATCH)
        for i, (high, wide) in enumerate(grids)
    ]
    return {
        "input_ids": ids(*parts),
        "pixel_values": np.concatenate(flat),
        "grid_thws": np.array(
            [[1, high, wide] for high, wide in grids], dtype=np.int32
        ),
    }


# One picture of 4, 6 or 12 placeholders. Two pictures of different grids.
image, two_images = asks(request, GRIDS, (GRIDS[1], GRIDS[0]))


FAMILY = TinyFamily(
    name="kimi_k3",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step.",
    no_reference="transformers has no such class; every scenario is compared with mlx-vlm alone",
)
