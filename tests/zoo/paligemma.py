"""PaliGemma: SigLIP before Gemma, and a prompt whose tokens all see each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import paligemma as upstream

from ._build import Rule, enliven, pixels, spread, text_request
from ._oracle import generate_by_recomputing, put_pictures, to_mx
from ._pictures import prompt
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily, Trace

SIDE, PATCH, HIDDEN = 12, 4, 64
TOKENS = (SIDE // PATCH) ** 2
IMAGE = PLAIN


def build_with(seed: int, **text: Any) -> nn.Module:
    """Four layers of 64, two vision layers of 32. The checkpoint's own ``hidden_size`` is not the text's."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="paligemma",
            hidden_size=100,
            image_token_index=IMAGE,
            pad_token_id=END_OF_TEXT,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                hidden_size=HIDDEN,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
                use_bidirectional_attention=True,
                **text,
            ),
            vision_config=upstream.VisionConfig(
                num_hidden_layers=2,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=2,
                patch_size=PATCH,
                projection_dim=HIDDEN,
                image_size=SIDE,
            ),
        )
    )
    embedding = "language_model.model.embed_tokens.weight"
    rules = [
        # Small, and made up for by the last norm: else the current token's own embedding would win every step.
        Rule(embedding, spread(0.05)),
        # Norms multiply by one plus their weight.
        Rule(r"language_model\.model\.norm\.weight", spread(1.2, 5.8)),
        Rule(r"language_model\..*norm\.weight$", spread(0.2)),
    ]
    enliven(model, seed=seed, rules=rules, quiet=embedding)
    return model


def build() -> nn.Module:
    """Gemma's text."""
    return build_with(29, model_type="gemma")


def _request(seed: int, num_images: int, num_words: int) -> Inputs:
    ids = prompt(seed, [[IMAGE] * TOKENS] * num_images, num_words)
    # the processor begins the prompt with its pictures
    ids = ids[:, 3:] if num_images == 1 else ids
    return {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "pixel_values": pixels(seed, num_images, 3, SIDE, SIDE),
    }


def image(seed: int, size: int) -> Inputs:
    """One picture, always of nine placeholders, and 4, 7 or 10 words after it."""
    return _request(seed, 1, 4 + 3 * size)


def two_images(seed: int) -> Inputs:
    """Two pictures with words around them."""
    return _request(seed, 2, 4)


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step over the model's own layers: the prompt sees itself, what follows is causal."""
    arrays = to_mx(inputs)
    trunk = model.language_model.model
    prompt = trunk.embed_tokens(arrays["input_ids"])
    if "pixel_values" in arrays:
        features = [
            model.multi_modal_projector(
                model.vision_tower(
                    p[None].transpose(0, 2, 3, 1), output_hidden_states=True
                )[0]
            )
            for p in arrays["pixel_values"]
        ]
        prompt = put_pictures(
            prompt, arrays["input_ids"], IMAGE, mx.concatenate(features) / HIDDEN**0.5
        )
    length = prompt.shape[1]

    def logits(generated: list[int]) -> mx.array:
        hidden = mx.concatenate(
            [prompt, trunk.embed_tokens(mx.array([generated], dtype=mx.int32))], axis=1
        )
        rows = mx.arange(hidden.shape[1])[:, None]
        columns = mx.arange(hidden.shape[1])[None]
        mask = mx.where((columns <= rows) | (columns < length), 0.0, -1e9)[None, None]
        return model.language_model(None, inputs_embeds=hidden, mask=mask).logits[0, -1]

    return generate_by_recomputing(logits, num_tokens)


def tiny(name: str, build: Callable[[], nn.Module], variant_of: str = "") -> TinyFamily:
    """One of the two generations, which differ in the text model only."""
    return TinyFamily(
        name=name,
        build=build,
        text=text_request,
        image=image,
        two_images=two_images,
        variant_of=variant_of,
        greedy=greedy,
        oracle_note="The whole sequence at each step. mlx-vlm's loop encodes the first picture only, puts it at the start of "
        "the prompt, and scales it by a width that is not the text's. transformers agrees with what is here "
        "(tests/references).",
    )


FAMILY = tiny("paligemma", build)
