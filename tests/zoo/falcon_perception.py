"""Falcon Perception: as Falcon-OCR; a coordinate's or a size's token is embedded by what the state before it points at."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.falcon_perception import config as upstream_config
from mlx_vlm.models.falcon_perception import falcon_perception as upstream
from mlx_vlm.models.falcon_perception.language import create_falcon_perception_mask

from ._build import Rule, enliven, fan_in, text_request
from ._oracle import generate_by_recomputing, to_mx
from ._types import Inputs, TinyFamily, Trace
from .falcon_ocr import (
    CLASS,
    END,
    IMAGE,
    MARKERS,
    PATCH,
    TEXT,
    image,
    rules_beside_the_head,
)

# Plain ids here, with large rows in the head, so that tiny models point often.
COORDINATE, SIZE, SEGMENT = 7, 8, 9
BINS = 8


def build() -> nn.Module:
    """Four layers of 64; sinks and the picture's frequencies are not zero; no segmentation."""
    model = upstream.Model(
        upstream_config.ModelConfig(
            **MARKERS,
            coord_token_id=COORDINATE,
            size_token_id=SIZE,
            seg_token_id=SEGMENT,
            coord_enc_dim=16,
            coord_dec_dim=32,
            coord_out_dim=2 * BINS,
            size_enc_dim=16,
            size_dec_dim=32,
            size_out_dim=2 * BINS,
            do_segmentation=False,
            text_config=upstream_config.TextConfig(**TEXT),
            vision_config=upstream_config.VisionConfig(spatial_patch_size=PATCH),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, lambda random, shape: often(fan_in(3.0)(random, shape))),
        *rules_beside_the_head(model),
    ]
    enliven(model, seed=6, rules=rules, quiet=head)
    return model


def often(head: np.ndarray) -> np.ndarray:
    """A head (V, D) whose pointing tokens are far out, and so often the best."""
    head[[COORDINATE, SIZE, SEGMENT]] *= 1.7
    return head


def _point(logits: np.ndarray, found: list[tuple[float, float]]) -> tuple[float, float]:
    """The best bins of (2, BINS) logits as a point that is not near one of those found."""
    logits = logits.copy()
    while True:
        column, row = logits.argmax(axis=-1)
        point = (column / (BINS - 1), row / (BINS - 1))
        if not any(
            abs(x - point[0]) < 0.01 and abs(y - point[1]) < 0.01 for x, y in found
        ):
            return point
        logits[0, column] -= 1e9
        logits[1, row] -= 1e9


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step, causal but inside a picture; what the model points at is fed back."""
    arrays = to_mx(inputs)
    trunk = model.language_model.model
    prompt = trunk.embed_tokens(arrays["input_ids"])
    positions, delta = mx.arange(prompt.shape[1]), 0
    places = mx.zeros((1, prompt.shape[1], 2))
    if "pixel_values" in arrays:
        features = model._patchify_and_project(arrays["pixel_values"])
        prompt = model._merge_image_features(
            IMAGE, features, prompt, arrays["input_ids"]
        )
        positions, places, delta = model._precompute_positions(
            arrays["input_ids"], arrays["image_grid_hw"]
        )
    found: list[tuple[float, float]] = []
    current: dict[str, tuple[float, float]] = {}
    answer: list[mx.array] = []  # (1, 1, D) of each token so far
    # the state that the next token was taken from
    last = mx.zeros((1, prompt.shape[-1]))

    def embed(token: int) -> mx.array:
        nonlocal current
        if token == COORDINATE:
            current["point"] = _point(np.array(model.decode_coords(last)[0]), found)
            return model.coord_encoder(mx.array([current["point"]]))[None]
        if token == SIZE:
            current["size"] = (0.0, 0.0)
            return model.size_encoder(model.process_sizes(model.decode_sizes(last)))[
                None
            ]
        if token == SEGMENT:
            found.extend([current["point"]] if len(current) == 2 else [])
            current = {}
        return trunk.embed_tokens(mx.array([[token]]))

    def logits(generated: list[int]) -> mx.array:
        nonlocal last
        if generated:
            answer.append(embed(generated[-1]))
        tokens = mx.concatenate(
            [arrays["input_ids"], mx.array([generated], dtype=mx.int32)], axis=1
        )
        hidden = mx.concatenate([prompt, *answer], axis=1)
        end = prompt.shape[1] + delta
        hidden = trunk(
            tokens,
            hidden,
            mask=create_falcon_perception_mask(tokens, CLASS, END),
            position_ids=mx.concatenate(
                [positions, mx.arange(end, end + len(generated))]
            )[None],
            pos_hw=mx.concatenate([places, mx.zeros((1, len(generated), 2))], axis=1),
        )
        last = hidden[:, -1]
        return model.language_model.lm_head(hidden[0, -1])

    try:
        return generate_by_recomputing(logits, num_tokens)
    finally:
        trunk._last_hidden_state = None


FAMILY = TinyFamily(
    name="falcon_perception",
    build=build,
    text=text_request,
    image=image,
    two_images=None,
    no_two_images="positions are made of the first grid only (falcon_perception.py, `grid_hws[:1]`)",
    greedy=greedy,
    oracle_note="The whole sequence at each step over the model's own trunk, with the mask, the positions and what is fed "
    "back written out here; mlx-vlm's generate_step agrees for a picture on a fresh model (tests/test_zoo.py), and lets a "
    "text see its own future.",
    no_reference="transformers has no such class; test_falcon_perception_alone_agrees stands in",
)
