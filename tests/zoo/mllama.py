"""Llama 3.2 Vision: pictures enter through cross-attention layers, in up to four tiles, under a mask per text token."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import mllama as upstream

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
from ._oracle import generate_by_recomputing, to_mx
from ._types import VOCABULARY, Inputs, TinyFamily, Trace

# The head has eight rows less than the embedding, and the picture's id is the first without one.
HEAD = VOCABULARY - 8
IMAGE = HEAD
TILE, PATCH, MAX_TILES = 8, 4, 4
TOKENS_PER_TILE = (TILE // PATCH) ** 2 + 1
CROSS_LAYERS = [1, 3]

# Aspect ratio ids of the processor for at most four tiles, and the tiles each has.
WIDE, TALL, ONE, SQUARE, THREE = 2, 5, 1, 6, 3
NUM_TILES = {ONE: 1, WIDE: 2, TALL: 2, THREE: 3, SQUARE: 4}
SIZES = (ONE, THREE, SQUARE)


def build() -> nn.Module:
    """Five layers of 64, the second and fourth with cross-attention; no gate is zero."""
    vision_width, intermediate = 32, [0, 2]
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="mllama",
            vocab_size=HEAD,
            image_token_index=IMAGE,
            eos_token_id=[HEAD - 1],
            text_config=upstream.TextConfig(
                vocab_size=HEAD,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=5,
                num_attention_heads=4,
                num_key_value_heads=2,
                rope_theta=100.0,
                cross_attention_layers=CROSS_LAYERS,
            ),
            vision_config=upstream.VisionConfig(
                image_size=TILE,
                patch_size=PATCH,
                hidden_size=vision_width,
                intermediate_size=64,
                num_hidden_layers=3,
                num_attention_heads=2,
                max_num_tiles=MAX_TILES,
                num_global_layers=1,
                vision_output_dim=vision_width * (1 + len(intermediate)),
                intermediate_layers_indices=intermediate,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"multi_modal_projector\.weight$", fan_in(0.4)),
        Rule(r"gate(_attn|_ffn)?$", spread(0.2, 0.6)),
        Rule(r"class_embedding$|gated_positional_embedding\.embedding$", spread(1.0)),
    ]
    enliven(model, seed=6, rules=rules, quiet=head)
    return model


def _request(seed: int, ratios: Sequence[int]) -> Inputs:
    """Words and pictures in turn, words last; padding tiles are black, as the processor leaves them."""
    parts = [words(seed, 2)]
    for index, ratio in enumerate(ratios):
        parts += [[IMAGE], words(seed + 101 * (index + 1), 3 + 2 * NUM_TILES[ratio])]
    input_ids = ids(*parts)
    tiles = np.zeros((1, len(ratios), MAX_TILES, 3, TILE, TILE), dtype=np.float32)
    tile_mask = np.zeros((1, len(ratios), MAX_TILES), dtype=np.int32)
    for index, ratio in enumerate(ratios):
        tiles[0, index, : NUM_TILES[ratio]] = pixels(
            seed + 31 * index, NUM_TILES[ratio], 3, TILE, TILE
        )
        tile_mask[0, index, : NUM_TILES[ratio]] = 1
    return {
        "input_ids": input_ids,
        "pixel_values": tiles,
        "aspect_ratio_ids": np.array([ratios], dtype=np.int32),
        "aspect_ratio_mask": tile_mask,
        "cross_attention_mask": _seen_tiles(input_ids[0], tile_mask[0]),
    }


def _seen_tiles(tokens: np.ndarray, tile_mask: np.ndarray) -> np.ndarray:
    """(1, L, images, tiles): a token sees the real tiles of the last picture before it (`MllamaProcessor`'s rule)."""
    starts = np.flatnonzero(tokens == IMAGE)
    ends = [*starts[1:], len(tokens)]
    mask = np.zeros((1, len(tokens), *tile_mask.shape), dtype=np.int64)
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        mask[0, start:end, index] = tile_mask[index]
    return mask


# One picture of 1, 3 or 4 tiles. A picture of two tiles, then one of a single tile.
image, two_images = asks(_request, SIZES, (WIDE, ONE))


def _vision_states(model: nn.Module, arrays: dict) -> mx.array:
    """(1, images * tiles * tokens, D)"""
    features = model.vision_tower(
        arrays["pixel_values"], arrays["aspect_ratio_ids"], arrays["aspect_ratio_mask"]
    )[0]
    return model.multi_modal_projector(features).reshape(
        1, -1, model.config.text_config.hidden_size
    )


def _cross_bias(seen: mx.array) -> tuple[mx.array, mx.array]:
    """From (L, images, tiles): the additive mask (1, 1, L, keys), and which rows see anything (1, 1, L, 1).

    A row that sees nothing attends to everything, but its MLP is skipped (transformers,
    modeling_mllama.py:46-71 and 703-707).
    """
    keys = mx.repeat(
        seen.reshape(1, 1, seen.shape[0], -1), TOKENS_PER_TILE, axis=-1
    ).astype(mx.float32)
    sees = keys.max(axis=-1, keepdims=True)
    return (1.0 - keys) * -1e9 * sees, sees


def _logits(
    model: nn.Module, tokens: mx.array, states: mx.array | None, seen: mx.array | None
) -> mx.array:
    """(V,) after the last of (1, L) tokens, computed from nothing."""
    language = model.language_model
    bias, sees = (None, None) if seen is None else _cross_bias(seen)
    hidden = language.model.embed_tokens(tokens)
    for index, layer in enumerate(language.model.layers):
        if index not in CROSS_LAYERS:
            hidden = layer(hidden, mask="causal")
        elif states is not None:
            hidden = layer(
                hidden, states, attention_mask=bias, full_text_row_masked_out_mask=sees
            )
    return language.lm_head(language.model.norm(hidden[:, -1]))[0]


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step; a generated token sees what the prompt's last token saw."""
    arrays = to_mx(inputs)
    has_image = "pixel_values" in arrays
    states = _vision_states(model, arrays) if has_image else None

    def logits(generated: list[int]) -> mx.array:
        tokens = mx.concatenate(
            [arrays["input_ids"], mx.array([generated], dtype=mx.int32)], axis=1
        )
        if not has_image:
            return _logits(model, tokens, None, None)
        seen = arrays["cross_attention_mask"][0]
        tail = mx.repeat(seen[-1:], len(generated), axis=0)
        return _logits(model, tokens, states, mx.concatenate([seen, tail]))

    return generate_by_recomputing(logits, num_tokens)


FAMILY = TinyFamily(
    name="mllama",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="The whole sequence at each step over the model's own layers. mlx-vlm's loop is wrong twice: it runs "
    "cross-attention on text-only prompts and forgets the cross-attention mask after the first token. "
    "transformers skips those layers and repeats the mask's last row; it agrees (tests/references).",
)
