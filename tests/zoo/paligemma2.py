"""PaliGemma 2: as PaliGemma, with Gemma 2's capped attention and logits."""

from __future__ import annotations

import mlx.nn as nn

from .paligemma import build_with, tiny


def build() -> nn.Module:
    """Gemma 2's text, with caps that bite."""
    return build_with(
        51,
        model_type="gemma2",
        query_pre_attn_scalar=16,
        attn_logit_softcapping=10.0,
        final_logit_softcapping=12.0,
    )


FAMILY = tiny("paligemma2", build, variant_of="paligemma")
