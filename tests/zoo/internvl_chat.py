"""InternVL Chat: InternViT tiles, pixels shuffled together by two, Qwen2 text."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import internvl_chat as upstream

from ._build import Rule, enliven, fan_in, spread, text_request
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily
from .internvl import IMAGE, NUM_TILES, PATCH, TILE, greedy, request

VIDEO = PLAIN + 3


def build() -> nn.Module:
    """Four layers of 64, two vision layers of 32 whose layer scales are not small."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="internvl_chat",
            image_token_index=IMAGE,
            video_token_index=VIDEO,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                model_type="qwen2",
                hidden_size=64,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                rms_norm_eps=1e-6,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
            ),
            vision_config=upstream.VisionConfig(
                model_type="intern_vit_6b",
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=TILE,
                patch_size=PATCH,
                drop_path_rate=0.0,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"(class_embedding|position_embedding)$", spread(0.5)),
        Rule(r"\.ls\d$", spread(0.2, 0.8)),
    ]
    enliven(model, seed=25, rules=rules, quiet=head)
    return model


def _named(inputs: Inputs) -> Inputs:
    """The processor says which id its pictures have."""
    return {**inputs, "image_token_index": IMAGE}


def image(seed: int, size: int) -> Inputs:
    """One picture of 1, 3 or 5 tiles."""
    return _named(request(seed, [NUM_TILES[size]]))


def two_images(seed: int) -> Inputs:
    """A picture of three tiles and one of a single tile."""
    return _named(request(seed, [3, 1]))


FAMILY = TinyFamily(
    name="internvl_chat",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step with the vision side's exact GELU in place of its tanh form.",
)
