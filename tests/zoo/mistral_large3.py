"""Mistral Large 3: the tower of Mistral Small 3.1 and DeepSeek-V3 text over latents, with experts."""

from __future__ import annotations

from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models import mistral_large3 as upstream
from mlx_vlm.models.mistral_large3.config import TextConfig

from ._build import Rule, enliven, spread, text_request
from ._deepseek import HEAD, LATENT, RULES, TEXT
from ._oracle import generate_by_recomputing, to_mx
from ._types import END_OF_TEXT, VOCABULARY, Inputs, TinyFamily, Trace
from .mistral3 import MERGE, image, two_images
from .pixtral import IMAGE, vision_config


def build() -> nn.Module:
    """Four layers of 64, the last three of four experts; two vision layers of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            image_token_id=IMAGE,
            spatial_merge_size=MERGE,
            vocab_size=VOCABULARY,
            eos_token_id=[END_OF_TEXT],
            text_config=TextConfig(**TEXT, **LATENT, num_key_value_heads=4),
            vision_config=vision_config(),
        )
    )
    enliven(
        model,
        seed=91,
        rules=[Rule(r"e_score_correction_bias$", spread(0.0)), *RULES],
        quiet=HEAD,
    )
    return model


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step through the decoder's layers, which mlx-vlm's own loop gives ids instead.

    Experts are weighed by a softmax, as in vLLM and in transformers' Mistral 4, which has the same text model.
    """
    prompt = model.get_input_embeddings(**to_mx(inputs)).inputs_embeds
    language = model.language_model

    def logits(generated: list[int]) -> mx.array:
        tail = language.model.embed_tokens(mx.array([generated], dtype=mx.int32))
        hidden = mx.concatenate([prompt, tail], axis=1)
        mask = mx.tril(mx.ones((hidden.shape[1], hidden.shape[1]), dtype=mx.bool_))
        for layer in language.model.layers:
            hidden = layer(hidden, mask)
        return language.lm_head(language.model.norm(hidden))[0, -1]

    with mock.patch(
        "mlx_vlm.models.deepseek_v3.language.group_expert_select", _by_softmax
    ):
        return generate_by_recomputing(logits, num_tokens)


def _by_softmax(
    gates: mx.array, bias: mx.array, count: int, *settings: Any
) -> tuple[mx.array, mx.array]:
    """The likeliest experts, and their shares of what they have together."""
    chosen = mx.argsort(-gates, axis=-1)[..., :count]
    return chosen, mx.softmax(mx.take_along_axis(gates, chosen, axis=-1), axis=-1)


FAMILY = TinyFamily(
    name="mistral_large3",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="the whole sequence through the decoder's layers, beginning with the embeddings that mlx-vlm's model makes "
    "and its decoder ignores, and with experts weighed by a softmax.",
    wrong_alone=("text", "image_1", "two_images"),
)
