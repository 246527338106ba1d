"""Families whose tower cannot be made small: features are given where pictures belong, one placeholder for each."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ._build import text_request
from ._oracle import generate_from_embeddings, put_pictures, to_mx
from ._pictures import expanded, prompt
from ._types import PLAIN, Inputs, TinyFamily, Trace

IMAGE = PLAIN
TOKENS, HIDDEN = 7, 64


def request(seed: int, num_images: int, num_words: int) -> Inputs:
    """Pictures of seven features each, which are words' embeddings in scale, and words after each."""
    random = np.random.RandomState(seed + 7919)
    features = random.standard_normal(
        (num_images, TOKENS, HIDDEN)
    ) + random.standard_normal((num_images, 1, HIDDEN))
    return {
        "input_ids": prompt(seed, [[IMAGE]] * num_images, num_words),
        "pixel_values": np.zeros((num_images, 3, 4, 4), dtype=np.float32),
        "cached_image_features": features.astype(np.float32),
    }


def image(seed: int, size: int) -> Inputs:
    """One picture, always of seven features, and 4, 7 or 10 words after it."""
    return request(seed, 1, 4 + 3 * size)


def two_images(seed: int) -> Inputs:
    """Two pictures."""
    return request(seed, 2, 4)


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step, features put where the placeholders are."""
    arrays = to_mx(inputs)
    tokens, features = arrays["input_ids"], arrays.get("cached_image_features")
    if features is not None:
        tokens = mx.array(
            expanded(inputs["input_ids"], IMAGE, [len(picture) for picture in features])
        )
    embeds = model.language_model.model.embed_tokens(tokens)
    if features is not None:
        embeds = put_pictures(embeds, tokens, IMAGE, features.reshape(-1, HIDDEN))
    return generate_from_embeddings(model, embeds, num_tokens)


FACTS: dict[str, Any] = {
    "text": text_request,
    "image": image,
    "two_images": two_images,
    "greedy": greedy,
}


def tiny(name: str, build: Any, **facts: Any) -> TinyFamily:
    """A family of this kind."""
    return TinyFamily(name=name, build=build, **FACTS, **facts)
