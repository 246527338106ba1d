"""Cohere Compass: sliding and full layers, attention and MLP side by side, M-RoPE interleaved, deepstack."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import cohere_compass as upstream

from . import _qwen
from ._build import Rule, enliven, spread, text_request
from ._oracle import generate_alone
from ._qwen import image, two_images
from ._types import END_OF_TEXT, VOCABULARY, TinyFamily

WINDOW = 8


def build() -> nn.Module:
    """Four layers of 64, every second with a window; two vision blocks of 32, both with a deepstack output."""
    section = {"rope_theta": 100.0, "mrope_section": [4, 2, 2]}
    model = upstream.Model(
        upstream.ModelConfig(
            image_token_id=_qwen.IMAGE,
            vision_start_token_id=_qwen.VISION_START,
            vision_end_token_id=_qwen.VISION_END,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                max_position_embeddings=512,
                rope_parameters={
                    "sliding_attention": section,
                    "full_attention": section,
                },
                sliding_window=WINDOW,
                layer_types=["sliding_attention", "full_attention"] * 2,
                logit_scale=3.0,
                tie_word_embeddings=True,
            ),
            vision_config=upstream.VisionConfig(
                depth=2,
                hidden_size=32,
                intermediate_size=64,
                num_heads=2,
                patch_size=_qwen.PATCH,
                spatial_merge_size=_qwen.MERGE,
                temporal_patch_size=_qwen.TEMPORAL_PATCH,
                out_hidden_size=64,
                num_position_embeddings=25,
                deepstack_visual_indexes=[0, 1],
            ),
        )
    )
    embedding = "language_model.model.embed_tokens.weight"
    rules = [Rule(embedding, spread(0.125)), Rule(r"norm\.weight$", spread(0.2, 1.0))]
    enliven(model, seed=66, rules=rules, quiet=embedding)
    return model


FAMILY = TinyFamily(
    name="cohere_compass",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    window=WINDOW,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step with a clean language model; transformers agrees (tests/references).",
)
