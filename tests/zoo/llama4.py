"""Llama 4: blocks of positions with RoPE on three layers of four, the fourth sees all and scales its queries; experts."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import llama4 as upstream
from mlx_vlm.models.llama4.vision import Llama4VisionMLP

from ._build import (
    Rule,
    asks,
    enliven,
    fan_in,
    ids,
    pixels,
    spread,
    text_request,
    words,
)
from ._deepseek import heads
from ._oracle import generate_alone
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily, Trace

IMAGE, START, END, TILE = PLAIN, PLAIN + 1, PLAIN + 2, PLAIN + 3
BLOCK = 8
SIDE, PATCH = 4, 4
TOKENS_PER_TILE = (SIDE // 2) ** 2
NUM_TILES = (1, 3, 5)  # a whole view alone, or tiles and then the whole view


def build() -> nn.Module:
    """Five layers of 64, the second and fourth of four experts."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="llama4",
            image_token_id=IMAGE,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                model_type="llama4_text",
                hidden_size=64,
                intermediate_size=48,
                intermediate_size_mlp=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                rms_norm_eps=1e-6,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
                num_hidden_layers=5,
                num_local_experts=4,
                interleave_moe_layer_step=2,
                attention_chunk_size=BLOCK,
                floor_scale=4,
                attn_scale=0.5,
                max_position_embeddings=512,
            ),
            vision_config=upstream.VisionConfig(
                model_type="llama4_vision_model",
                hidden_size=32,
                image_size=SIDE * PATCH,
                initializer_range=0.02,
                intermediate_size=128,
                norm_eps=1e-5,
                num_attention_heads=2,
                num_channels=3,
                num_hidden_layers=2,
                patch_size=PATCH,
                pixel_shuffle_ratio=0.5,
                projector_dropout=0.0,
                projector_input_dim=48,
                projector_output_dim=48,
                rope_theta=100.0,
                vision_feature_layer=-1,
                vision_feature_select_strategy="default",
                vision_output_dim=48,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"experts\.\w+\.weight$", heads),
        Rule(r"class_embedding$|positional_embedding", spread(0.5)),
    ]
    enliven(model, seed=86, rules=rules, quiet=head)
    return model


def _request(seed: int, tiles: list[int]) -> Inputs:
    parts = [words(seed, 3)]
    for index, count in enumerate(tiles):
        views = [
            token for _ in range(count) for token in [*[IMAGE] * TOKENS_PER_TILE, TILE]
        ]
        parts += [[START, *views, END], words(seed + 101 * (index + 1), 5)]
    return {
        "input_ids": ids(*parts),
        "pixel_values": pixels(seed, sum(tiles), 3, SIDE * PATCH, SIDE * PATCH),
    }


# One picture of 1, 3 or 5 views. A picture of three views and one of a single view.
image, two_images = asks(_request, NUM_TILES, (3, 1))


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's own path, with the exact GELU in the tower while it lasts."""
    found = [
        module
        for _, module in model.vision_model.named_modules()
        if isinstance(module, Llama4VisionMLP)
    ]
    before = [module.activation_fn for module in found]
    for module in found:
        module.activation_fn = nn.GELU()
    try:
        return generate_alone(model, inputs, num_tokens)
    finally:
        for module, activation in zip(found, before, strict=True):
            module.activation_fn = activation


FAMILY = TinyFamily(
    name="llama4",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    window=BLOCK,
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step with the exact GELU in the tower, which upstream replaces by a sigmoid "
    "(llama4/vision.py:155); transformers agrees (tests/references).",
    wrong_alone=("image_1",),
)
