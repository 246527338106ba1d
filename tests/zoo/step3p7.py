"""Step 3.7: sliding layers with more heads than full ones, gates for heads, experts; pictures as patches and whole."""

from __future__ import annotations

import mlx.nn as nn
import numpy as np
from mlx_vlm.models import step3p7 as upstream

from ._build import Rule, enliven, fan_in, ids, pixels, spread, text_request, words
from ._deepseek import heads
from ._oracle import generate_alone
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

IMAGE, START, END = PLAIN, PLAIN + 1, PLAIN + 2
WINDOW, PATCH, SIDE = 8, 4, 8
TOKENS = (SIDE // 4) ** 2
SMALL = 6
"""Patches a side where they are interpolated; halved twice, rounded up, they are as many tokens as those of a view."""
NUM_PATCHES = (0, 1, 3)


def build() -> nn.Module:
    """Four layers of 64, two of them with a window, the last two of four experts."""
    model = upstream.Model(
        upstream.ModelConfig(
            image_token_id=IMAGE,
            vocab_size=VOCABULARY,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                hidden_size=64,
                intermediate_size=96,
                num_attention_heads=4,
                num_attention_groups=2,
                num_hidden_layers=4,
                vocab_size=VOCABULARY,
                moe_intermediate_size=32,
                moe_num_experts=4,
                moe_top_k=2,
                rope_theta=100.0,
                share_expert_dim=32,
                head_dim=16,
                layer_types=["full_attention", "sliding_attention"] * 2,
                sliding_window=WINDOW,
                use_head_wise_attn_gate=True,
                use_moe_router_bias=True,
                attention_other_setting={
                    "num_attention_heads": 6,
                    "num_attention_groups": 2,
                },
                swiglu_limits=[None, None, 2.0, None],
                partial_rotary_factors=[0.5, 1.0, 0.5, 1.0],
                moe_layers_enum="2,3",
                max_position_embeddings=512,
            ),
            vision_config=upstream.VisionConfig(
                width=32,
                layers=2,
                heads=2,
                image_size=SIDE * PATCH,
                mlp_ratio=2.0,
                patch_size=PATCH,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"switch_mlp\.", heads),
        Rule(r"router_bias$", spread(0.2)),
        Rule(r"positional_embedding$|\.gamma$", spread(0.5)),
        Rule(r"norm\.weight$", spread(0.2, 1.0)),
    ]
    enliven(model, seed=38, rules=rules, quiet=head)
    return model


def _request(seed: int, patches: list[int]) -> Inputs:
    parts = [words(seed, 3)]
    for index, count in enumerate(patches):
        views = [
            token for _ in range(count + 1) for token in [START, *[IMAGE] * TOKENS, END]
        ]
        parts += [views, words(seed + 101 * (index + 1), 4)]
    view = (3, SIDE * PATCH, SIDE * PATCH)
    request: Inputs = {
        "input_ids": ids(*parts),
        "pixel_values": pixels(seed, len(patches), *view),
        "num_patches": np.array(patches, dtype=np.int32),
    }
    return request | (
        {"patch_pixel_values": pixels(seed + 31, sum(patches), *view)}
        if sum(patches)
        else {}
    )


def image(seed: int, size: int) -> Inputs:
    """One picture with 0, 1 or 3 patches before its whole view."""
    return _request(seed, [NUM_PATCHES[size]])


def small_patches(seed: int) -> Inputs:
    """Patches smaller than the view, as published (504 pixels of 728): positions are interpolated for them."""
    request, size = _request(seed, [2]), SMALL * PATCH
    return request | {"patch_pixel_values": pixels(seed + 31, 2, 3, size, size)}


def two_images(seed: int) -> Inputs:
    """Pictures with a patch and without."""
    return _request(seed, [1, 0])


FAMILY = TinyFamily(
    name="step3p7",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    window=WINDOW,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step.",
    also={"small_patches": small_patches},
)
