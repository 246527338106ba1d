"""MiniMax M3 VL: layers whose tokens attend to the blocks that an index picks; experts; a tower with 3-D rotation."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import minimax_m3_vl as upstream

from . import _qwen
from ._build import Rule, enliven, fan_in, spread, text_request
from ._deepseek import heads
from ._oracle import generate_alone
from ._qwen import image, two_images
from ._types import END_OF_TEXT, VOCABULARY, TinyFamily

BLOCK, TOP = 4, 2


def build() -> nn.Module:
    """Four layers of 64: the first attends to all, the others to two blocks of four; the last two of four experts."""
    model = upstream.Model(
        upstream.ModelConfig(
            image_token_index=_qwen.IMAGE,
            video_token_index=_qwen.VIDEO,
            vision_start_token_id=_qwen.VISION_START,
            vision_end_token_id=_qwen.VISION_END,
            projector_hidden_size=64,
            vocab_size=VOCABULARY,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                hidden_size=64,
                intermediate_size=32,
                dense_intermediate_size=96,
                shared_intermediate_size=32,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                num_hidden_layers=4,
                rope_theta=100.0,
                max_position_embeddings=512,
                vocab_size=VOCABULARY,
                num_local_experts=4,
                num_experts_per_tok=2,
                moe_layer_freq=[0, 0, 1, 1],
                sparse_attention_config={
                    "use_sparse_attention": True,
                    "sparse_index_dim": 16,
                    "sparse_num_index_heads": 2,
                    "sparse_topk_blocks": TOP,
                    "sparse_block_size": BLOCK,
                    "sparse_init_block": 0,
                    "sparse_local_block": 1,
                    "sparse_score_type": "max",
                    "sparse_attention_freq": [0, 1, 1, 1],
                },
            ),
            vision_config=upstream.VisionConfig(
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=2,
                num_hidden_layers=2,
                image_size=64,
                patch_size=_qwen.PATCH,
                projection_dim=64,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"switch_mlp\.", heads),
        Rule(r"patch_embedding\.weight$|\.gate\.weight$", fan_in(1.3)),
        Rule(r"e_score_correction_bias$", spread(0.2)),
        Rule(r"language_model\..*norm\.weight$", spread(0.2)),
    ]
    enliven(model, seed=41, rules=rules, quiet=head)
    return model


FAMILY = TinyFamily(
    name="minimax_m3_vl",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step with a clean language model.",
)
