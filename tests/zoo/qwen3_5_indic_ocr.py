"""The OCR stage of IndicOCR, which mlx-vlm builds as Qwen3.5 with its own vocabulary."""

from __future__ import annotations

from dataclasses import replace

import mlx.nn as nn
from mlx_vlm.models import indic_ocr, qwen3_5

from . import qwen3_5 as tiny
from ._build import enliven


def build() -> nn.Module:
    """As Qwen3.5's: two recurrent layers and two with attention."""
    text = qwen3_5.TextConfig(
        model_type="qwen3_5_text",
        intermediate_size=96,
        rope_parameters=tiny.rope(),
        **tiny.TEXT,
    )
    vision = qwen3_5.VisionConfig(**tiny.VISION)
    model = indic_ocr.Model(
        indic_ocr.ModelConfig(text_config=text, vision_config=vision, **tiny.MARKERS)
    )
    enliven(model, seed=38, rules=tiny.RULES, quiet=tiny.HEAD)
    return model


FAMILY = replace(
    tiny.FAMILY,
    name="qwen3_5_indic_ocr",
    variant_of="qwen3_5",
    build=build,
    oracle_note="mlx-vlm's generate_step with a clean language model.",
    no_reference="transformers has no such class; the same code as qwen3_5, which is recorded",
)
