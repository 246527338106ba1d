"""Command A Vision (cohere2_vision), which mlx-vlm loads as Aya Vision: its projector has no norm, the tower's output has."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from . import aya_vision
from ._oracle import generate_alone
from ._types import Inputs, Trace


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's loop, given features of the tower's normed output."""
    if "pixel_values" in inputs:
        tower = model.vision_tower.vision_model
        hidden, _ = tower.encoder(
            tower.embeddings(mx.array(inputs["pixel_values"].transpose(0, 2, 3, 1)))
        )
        features = model.multi_modal_projector(tower.post_layernorm(hidden))
        inputs = {**inputs, "cached_image_features": np.array(features)}
    return generate_alone(model, inputs, num_tokens)


FAMILY = replace(
    aya_vision.FAMILY,
    name="aya_vision_cohere2",
    variant_of="aya_vision",
    build=partial(aya_vision.build, "cohere2_vision", seed=5),
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step, given features of the tower's normed output; transformers agrees "
    "(tests/references).",
    wrong_alone=("image_0", "two_images"),
)
