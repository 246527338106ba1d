"""DeepSeek-V4 without pictures, as transformers has it."""

from __future__ import annotations

import mlx.nn as nn

from ._build import text_by_size, text_request
from ._types import TinyFamily
from .deepseek_v4 import greedy, made, settings


def build() -> nn.Module:
    """The same four layers, other weights."""
    return made(settings(), seed=13)


FAMILY = TinyFamily(
    name="deepseek_v4_text",
    variant_of="deepseek_v4",
    build=build,
    text=text_request,
    image=text_by_size,
    two_images=None,
    no_two_images="a model without pictures",
    text_only=True,
    window=16,
    greedy=greedy,
    wrong_alone=("text",),
    also={"long_text": lambda seed: text_request(seed, 61)},
    oracle_note="mlx-vlm's whole-prompt prefill for each token anew; transformers agrees (tests/references).",
)
