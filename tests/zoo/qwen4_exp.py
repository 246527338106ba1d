"""Qwen4-Exp: delta nets with hashed n-grams, attention over blocks that an indexer picks, streams mixed by every layer."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import qwen4_exp as upstream

from . import _qwen, _videos
from ._build import Rule, enliven, fan_in, ids, spread, text_request, words
from ._types import END_OF_TEXT, Inputs, TinyFamily
from .qwen3_5 import HEAD, MARKERS, RULES, TEXT, VISION, rope
from .qwen3_vl import image, two_images


def build() -> nn.Module:
    """Four layers of 64 in three streams: delta nets with n-grams and attention in turn, experts; two vision blocks of 32."""
    text = upstream.TextConfig(
        model_type="qwen4_exp_text",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
        rope_parameters=rope(),
        hc_count=3,
        hc_lowrank=24,
        ple_layer_ids=[1, 3],
        ple_embed_dim=32,
        ple_conv_kernel_size=3,
        heads_per_ngram=2,
        ngram_vocab_size_base=60,
        make_ngram_vocab_size_divisible_by=8,
        split_ngram_parts=4,
        # of fewer, some blocks have no score at all, and which of them are taken is chance
        indexer_n_heads=16,
        indexer_head_dim=16,
        indexer_budget=6,
        indexer_compress_ratio=2,
        eos_token_id=END_OF_TEXT,
        **TEXT,
    )
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="qwen4_exp",
            text_config=text,
            vision_config=upstream.VisionConfig(**VISION),
            **MARKERS,
        )
    )
    rules = [
        Rule(HEAD, fan_in(6.5)),  # the last layer's streams are gated and averaged
        *RULES,
        # centred at zero
        Rule(
            r"(hc_norm|layernorm|[qk]_norm|norm_(key|query|conv))\.weight$", spread(0.2)
        ),
        Rule(r"block_inject_weight", fan_in(3.0)),
    ]
    enliven(model, seed=41, rules=rules, quiet=HEAD)
    return model


def two_texts(seed: int) -> Inputs:
    """Text after an end of text, which n-grams do not reach across."""
    return {"input_ids": ids(words(seed, 6), [END_OF_TEXT], words(seed + 1, 3))}


FAMILY = TinyFamily(
    name="qwen4_exp",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    window=6,
    greedy=_videos.greedy,
    oracle_note="mlx-vlm's generate_step with a clean language model; tests.zoo._videos where there is a video: "
    "transformers agrees (tests/references).",
    video=_qwen.stamped_video_request,
    picture_and_video=_qwen.stamped_picture_and_video,
    also={"two_texts": two_texts},
)
