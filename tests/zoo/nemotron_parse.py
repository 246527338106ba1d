"""Nemotron-Parse: a vision transformer with a neck, and a decoder without positions that reads it."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import nemotron_parse as upstream

from ._build import Rule, enliven, fan_in, ids, pixels, spread, words
from ._oracle import generate_alone
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

START = PLAIN
PATCH = 4
#: (high, wide) in pixels: four columns of patches become one.
SIZES = ((8, 16), (16, 16), (8, 48))


def build() -> nn.Module:
    """Two vision blocks of 32 and three decoder layers of 64."""
    vision = upstream.VisionConfig(
        hidden_size=32, num_heads=2, num_layers=2, patch_size=PATCH, neck_dim=64
    )
    text = upstream.TextConfig(
        d_model=64,
        decoder_attention_heads=4,
        decoder_ffn_dim=96,
        decoder_layers=3,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        bos_token_id=START,
        eos_token_id=END_OF_TEXT,
        decoder_start_token_id=END_OF_TEXT,
        pad_token_id=PLAIN + 1,
    )
    config = upstream.ModelConfig(
        vision_config=vision,
        text_config=text,
        vocab_size=VOCABULARY,
        eos_token_id=END_OF_TEXT,
        bos_token_id=START,
    )
    model = upstream.Model(config)
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"pos_embed|cls_token", spread(0.5)),
        Rule(r"attn\.[qk]_proj\.weight$", fan_in(2.5)),
        # The last token must not drown what the others say, or the same one comes for ever: there are no positions.
        Rule(r"decoder.*attn\.out_proj\.weight$", fan_in(0.8)),
        Rule(r"decoder.*fc2\.weight$", fan_in(1.0)),
    ]
    enliven(model, seed=60, rules=rules, quiet=head)
    return model


def image(seed: int, size: int) -> Inputs:
    """One picture and 5, 8 or 11 words between the tokens that a tokenizer puts around them."""
    return {
        "input_ids": ids([START], words(seed, 5 + 3 * size), [END_OF_TEXT]),
        "pixel_values": pixels(seed, 1, 3, *SIZES[size]),
    }


def text(seed: int, length: int) -> Inputs:
    """There is no request without a picture: `length` words as they are, below a small one."""
    return {
        "input_ids": ids(words(seed, length)),
        "pixel_values": pixels(seed, 1, 3, *SIZES[0]),
    }


FAMILY = TinyFamily(
    name="nemotron_parse",
    build=build,
    text=text,
    image=image,
    two_images=None,
    no_two_images="its encoder's output is one picture's (nemotron_parse.py, get_input_embeddings)",
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step, which keeps the encoder's output for every step.",
    no_reference="transformers has no such class: the published code comes with the checkpoint",
)
