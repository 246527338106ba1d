"""Falcon-OCR: no vision tower; a picture attends within itself both ways; half of each head turns with the picture's
rows and columns; attention has sinks.
"""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_vlm.models import falcon_ocr as upstream

from ._build import (
    Rule,
    constant,
    enliven,
    fan_in,
    ids,
    pixels,
    spread,
    text_request,
    words,
)
from ._oracle import generate_alone
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

PATCH = 4
GRIDS = ((2, 3), (3, 4), (5, 2))
IMAGE, CLASS, END = PLAIN, PLAIN + 1, PLAIN + 6
REGISTERS = [PLAIN + 2, PLAIN + 3, PLAIN + 4, PLAIN + 5]
OCR = PLAIN + 7

MARKERS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "eos_id": END_OF_TEXT,
    "eos_token_id": [END_OF_TEXT],
    "img_id": IMAGE,
    "image_cls_token_id": CLASS,
    **{
        f"image_reg_{number}_token_id": token
        for number, token in enumerate(REGISTERS, 1)
    },
    "img_end_id": END,
}
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rope_theta": 100.0,
}


def build() -> nn.Module:
    """Four layers of 64; sinks and the picture's frequencies are not zero."""
    model = upstream.Model(
        upstream.ModelConfig(
            **MARKERS,
            text_config=upstream.TextConfig(**TEXT),
            vision_config=upstream.VisionConfig(spatial_patch_size=PATCH),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [Rule(head, fan_in(3.0)), *rules_beside_the_head(model)]
    enliven(model, seed=5, rules=rules, quiet=head)
    return model


def rules_beside_the_head(model: nn.Module) -> list[Rule]:
    """Sinks and frequencies; and computed tables, not weights, which keep the values the class gave them."""
    tables = {
        name: np.array(getattr(model.language_model.model, name))
        for name in ("cos_1d", "sin_1d")
    }
    kept = [Rule(rf"\.{name}$", constant(table)) for name, table in tables.items()]
    return [
        Rule(r"\.sinks$", spread(1.0)),
        Rule("freqs_cis_golden", spread(1.5)),
        *kept,
    ]


def image(seed: int, size: int) -> Inputs:
    """A picture of 6, 12 or 10 patches and then the instruction, as `FalconOCRProcessor` orders them."""
    high, wide = GRIDS[size]
    return {
        "input_ids": ids(
            [CLASS, *REGISTERS, *[IMAGE] * (high * wide), END],
            words(seed, 4 + size),
            [OCR],
        ),
        "pixel_values": pixels(seed, 1, high * PATCH, wide * PATCH, 3),
        "image_grid_hw": np.array([[high, wide]], dtype=np.int32),
    }


FAMILY = TinyFamily(
    name="falcon_ocr",
    build=build,
    text=text_request,
    image=image,
    two_images=None,
    no_two_images="the processor's template places one picture, and get_rope_index keeps only the first grid "
    "(mlx_vlm/models/falcon_ocr/language.py, `grid_hws[:1]`), so nothing says where a second one would be",
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step, unchunked (the family asks for it), with no rope delta of an earlier picture "
    "(tests/test_zoo.py checks it against the whole sequence computed again at each step).",
)
