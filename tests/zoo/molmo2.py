"""Molmo 2: features are added to placeholder tokens; all tokens of all pictures see each other."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.molmo2 import config as upstream
from mlx_vlm.models.molmo2.molmo2 import Model

from . import _molmo
from ._build import Rule, asks, enliven, fan_in, spread, text_request
from ._molmo import (
    COLUMN,
    END,
    FRAME,
    FRAME_END,
    GRIDS,
    LOW,
    LOW_GRID,
    LOW_START,
    PAIR,
    PATCH,
    PATCH_TOKEN,
    POOLING,
    SIDE,
    START,
    TEXT,
    VISION,
    VIT_LAYERS,
    Grid,
    close_view,
)
from ._oracle import generate_by_recomputing, to_mx
from ._types import VOCABULARY, Inputs, TinyFamily, Trace


def build() -> nn.Module:
    """Four layers of 64, three vision layers of 32 of which two are read; the head knows no picture ids."""
    model = Model(
        upstream.ModelConfig(
            image_start_token_id=START,
            low_res_image_start_token_id=LOW_START,
            image_end_token_id=END,
            image_low_res_id=LOW,
            image_patch_id=PATCH_TOKEN,
            image_col_id=COLUMN,
            frame_start_token_id=FRAME,
            frame_end_token_id=FRAME_END,
            eos_token_id=[VOCABULARY - 1],
            text_config=upstream.TextConfig(**TEXT),
            vision_config=upstream.VisionConfig(
                vit_config=upstream.VitConfig(
                    **VISION, image_default_input_size=[SIDE * PATCH, SIDE * PATCH]
                ),
                adapter_config=upstream.AdapterConfig(**POOLING, vit_layers=VIT_LAYERS),
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [Rule(head, fan_in(3.0)), Rule(r"embedding$", spread(1.0))]
    enliven(model, seed=24, rules=rules, quiet=head)
    return model


def picture(grid: Grid) -> list[int]:
    """The ids of one picture, far view and then close view, as `Molmo2Processor.replace_image_token` orders them."""
    low_high, low_wide = LOW_GRID
    return [
        LOW_START,
        *([PATCH_TOKEN] * low_wide + [COLUMN]) * low_high,
        END,
        *close_view(grid),
    ]


def request(seed: int, grids: Sequence[Grid]) -> Inputs:
    return _molmo.request(seed, grids, picture)


# One picture of 6, 8 or 12 features. Two pictures with words between; the first sees the second.
image, two_images = asks(request, GRIDS, PAIR)


def is_picture(tokens: np.ndarray) -> np.ndarray:
    """(L,) bool"""
    return tokens >= VOCABULARY


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step, under a mask that lets picture tokens see each other."""
    arrays = to_mx(inputs)
    for block in model.vision_tower.image_vit.transformer:
        # upstream: a sigmoid for the tanh form that its config names
        block.feed_forward.act = nn.GELU(approx="precise")
    prompt = model.get_input_embeddings(**arrays).inputs_embeds
    language, tokens = model.language_model, np.asarray(inputs["input_ids"])[0]

    def logits(generated: list[int]) -> mx.array:
        hidden = mx.concatenate(
            [prompt, language.model.wte(mx.array([generated], dtype=mx.int32))], axis=1
        )
        picture = mx.array(
            is_picture(
                np.concatenate([tokens, np.array(generated, dtype=tokens.dtype)])
            )
        )
        places = mx.arange(hidden.shape[1])
        mask = (places[None] <= places[:, None]) | (picture[None] & picture[:, None])
        for block in language.model.blocks:
            hidden = block(hidden, mask)
        return language.lm_head(language.model.ln_f(hidden[:, -1]))[0]

    return generate_by_recomputing(logits, num_tokens)


FAMILY = TinyFamily(
    name="molmo2",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="The whole sequence at each step over the model's own layers. mlx-vlm makes no mask for pictures and "
    "takes another GELU in the tower; in transformers all picture tokens see each other, and its answers agree "
    "(tests/references).",
    wrong_alone=("image_1", "two_images"),
)
