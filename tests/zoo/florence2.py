"""Florence-2: encoder and decoder, learned positions, one picture whose features stand before the prompt."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import florence2 as upstream

from ._build import Rule, enliven, fan_in, ids, pixels, spread, text_request, words
from ._oracle import generate_alone
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

IMAGE, START = PLAIN, PLAIN + 1
SIZE = 64
NUM_FEATURES = 5
"""The tower halves a picture's sides five times; the mean of what is left stands beside it."""


def build() -> nn.Module:
    """Three encoder and three decoder layers of 64, five blocks of DaViT whose windows divide no side of the last."""
    config = upstream.ModelConfig(
        model_type="florence2",
        vocab_size=VOCABULARY,
        image_token_id=IMAGE,
        eos_token_id=[END_OF_TEXT],
        text_config=upstream.TextConfig(
            d_model=64,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            encoder_layers=3,
            decoder_layers=3,
            max_position_embeddings=128,
            vocab_size=VOCABULARY,
        ),
        vision_config=upstream.VisionConfig(
            depths=[1, 1, 2, 1],
            dim_embed=[8, 16, 24, 32],
            num_heads=[1, 2, 3, 4],
            num_groups=[1, 2, 3, 4],
            window_size=3,
            mlp_ratio=2.0,
            patch_prenorm=[False, True, True, True],
        ),
        image_feature_source=["spatial_avg_pool", "temporal_avg_pool"],  # as published
    )
    config.text_config.decoder_start_token_id = START
    model = upstream.Model(config)
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"image_proj|image_pos_embed|visual_temporal", spread(0.3)),
        # Small beside the tokens, which would else not be told apart after the last of the norms.
        Rule(
            r"decoder\.layers\.\d\.(self|encoder)_attn\.out_proj\.weight$", fan_in(0.4)
        ),
        Rule(
            r"decoder\.layers\.\d\.(self|encoder)_attn\.[qk]_proj\.weight$", fan_in(2.0)
        ),
        Rule(r"decoder\.layers\.\d\.fc2\.weight$", fan_in(0.6)),
    ]
    enliven(model, seed=40, rules=rules, quiet=head)
    return model


def image(seed: int, size: int) -> Inputs:
    """One picture and 5, 8 or 11 words."""
    return {
        "input_ids": ids([IMAGE], words(seed, 5 + 3 * size)),
        "pixel_values": pixels(seed, 1, 3, SIZE, SIZE),
    }


FAMILY = TinyFamily(
    name="florence2",
    build=build,
    text=text_request,
    image=image,
    two_images=None,
    no_two_images="the processor places one picture before a prompt (processing_florence2.py)",
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step, which runs encoder and decoder.",
)
