"""Mistral Small 3.1: Pixtral's tower, patches merged by two, Mistral text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.nn as nn
from mlx_vlm.models import mistral3 as upstream

from ._build import Rule, enliven, fan_in, text_request
from ._oracle import generate_alone
from ._types import END_OF_TEXT, VOCABULARY, Inputs, TinyFamily
from .pixtral import GRIDS, IMAGE, PATCH, request, vision_config

MERGE = 2


def build_with(seed: int, rules: Sequence[Rule] = (), **text: Any) -> nn.Module:
    """Four layers of 64, two vision layers of 32."""
    common: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
    }
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="mistral3",
            image_token_index=IMAGE,
            spatial_merge_size=MERGE,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(**common, **text),
            vision_config=vision_config(),
        )
    )
    head = "language_model.lm_head.weight"
    enliven(model, seed=seed, rules=[Rule(head, fan_in(3.0)), *rules], quiet=head)
    return model


def build() -> nn.Module:
    """Mistral's text, as in Mistral Small 3.1."""
    return build_with(
        61, model_type="mistral", num_key_value_heads=2, head_dim=16, rope_theta=100.0
    )


def image(seed: int, size: int) -> Inputs:
    """One picture of 4, 6 or 12 placeholders."""
    return request(seed, [GRIDS[size]], unit=PATCH * MERGE)


def two_images(seed: int) -> Inputs:
    """Two pictures of different grids."""
    return request(seed, [GRIDS[1], GRIDS[2]], unit=PATCH * MERGE)


def tiny(name: str, build: Callable[[], nn.Module], **more: Any) -> TinyFamily:
    """One of the three kinds of text model behind the same tower."""
    facts: dict[str, Any] = {
        "oracle_note": "mlx-vlm's generate_step; transformers agrees (tests/references).",
        "variant_of": "mistral3",
        "greedy": generate_alone,
        **more,
    }
    return TinyFamily(
        name=name,
        build=build,
        text=text_request,
        image=image,
        two_images=two_images,
        **facts,
    )


FAMILY = tiny("mistral3", build, variant_of="")
