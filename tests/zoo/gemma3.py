"""Gemma 3: sliding and full layers in turn, a picture attends within itself both ways, SigLIP features pooled."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import gemma3 as upstream

from ._build import Rule, enliven, pixels, spread, text_request
from ._oracle import generate_by_recomputing, put_pictures, to_mx
from ._pictures import prompt
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily, Trace

SIDE, PATCH = 24, 4
TOKENS = 9  # more than the window, so that a sliding layer cuts a picture
WINDOW, PATTERN, HIDDEN = 8, 2, 64
IMAGE, START, END = PLAIN, PLAIN + 1, PLAIN + 2


def build() -> nn.Module:
    """Four layers of 64, two vision layers of 32; the head is a copy of nothing (checkpoints tie it to the embedding)."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="gemma3",
            image_token_index=IMAGE,
            pad_token_id=END_OF_TEXT,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                model_type="gemma3_text",
                hidden_size=HIDDEN,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                query_pre_attn_scalar=16,
                vocab_size=VOCABULARY,
                rope_global_base_freq=100.0,
                rope_local_base_freq=50.0,
                sliding_window=WINDOW,
                sliding_window_pattern=PATTERN,
                mm_tokens_per_image=TOKENS,
            ),
            vision_config=upstream.VisionConfig(
                model_type="siglip_vision_model",
                num_hidden_layers=2,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=2,
                patch_size=PATCH,
                image_size=SIDE,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, spread(3.0 / 8)),
        Rule(r"embed_tokens\.weight", spread(0.125)),
        # Norms multiply by one plus their weight.
        Rule(r"language_model\..*norm\.weight$", spread(0.2)),
        Rule(r"mm_soft_emb_norm\.weight", spread(0.2)),
        Rule(r"mm_input_projection_weight", spread(1.0 / 32**0.5)),
    ]
    enliven(model, seed=28, rules=rules, quiet=head)
    return model


def _request(seed: int, num_images: int, num_words: int) -> Inputs:
    ids = prompt(seed, [[START, *[IMAGE] * TOKENS, END]] * num_images, num_words)
    return {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "pixel_values": pixels(seed, num_images, 3, SIDE, SIDE),
    }


def image(seed: int, size: int) -> Inputs:
    """One picture, always of nine placeholders, and 4, 7 or 10 words after it."""
    return _request(seed, 1, 4 + 3 * size)


def two_images(seed: int) -> Inputs:
    """Two pictures."""
    return _request(seed, 2, 4)


def masks(tokens: np.ndarray) -> tuple[mx.array, mx.array]:
    """(L, L) bools of a full and of a sliding layer: causal, and whatever lies in the same picture.

    A sliding layer's window cuts pictures too (transformers, modeling_gemma3.py, create_masks_for_vision_model).
    """
    distance = np.arange(len(tokens))[:, None] - np.arange(len(tokens))
    is_image = tokens == IMAGE
    number = np.cumsum(is_image & ~np.roll(is_image, 1)) * is_image
    same = (number[:, None] == number) & is_image
    return mx.array((distance >= 0) | same), mx.array(
        ((distance >= 0) | same) & (distance < WINDOW)
    )


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step over the model's own layers."""
    arrays = to_mx(inputs)
    trunk = model.language_model.model
    prompt = trunk.embed_tokens(arrays["input_ids"]) * HIDDEN**0.5
    if "pixel_values" in arrays:
        states, *_ = model.vision_tower(
            arrays["pixel_values"].transpose(0, 2, 3, 1), output_hidden_states=True
        )
        features = model.multi_modal_projector(states).reshape(-1, HIDDEN)
        prompt = put_pictures(prompt, arrays["input_ids"], IMAGE, features)

    def logits(generated: list[int]) -> mx.array:
        tail = trunk.embed_tokens(mx.array([generated], dtype=mx.int32)) * HIDDEN**0.5
        hidden = mx.concatenate([prompt, tail], axis=1)
        full, sliding = masks(
            np.append(inputs["input_ids"][0], np.array(generated, dtype=np.int32))
        )
        for index, layer in enumerate(trunk.layers):
            hidden = layer(hidden, full if index % PATTERN == PATTERN - 1 else sliding)
        return model.language_model.lm_head(trunk.norm(hidden))[0, -1]

    return generate_by_recomputing(logits, num_tokens)


FAMILY = TinyFamily(
    name="gemma3",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    window=WINDOW,
    greedy=greedy,
    oracle_note="The whole sequence at each step over the model's own layers. In mlx-vlm's loop the mask of pictures never "
    "reaches the language model, and features are divided by the root of a width that is not the text's. transformers "
    "agrees with what is here (tests/references).",
)
