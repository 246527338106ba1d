"""DeepSeek-OCR: SAM and CLIP before a decoder with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.modules import RememberingBatchTower, patches_in
from vlm_batch.adapters.placeholders import MaskedPositions
from vlm_batch.errors import InvalidPrompt
from vlm_batch.registry import ModelSpec, register

_SAM_POSITIONS = (
    "SAM's relative positions are stretched as torch does for pictures that are smaller than SAM's own (crops of 640 "
    "pixels); mlx-vlm begins half a step too early (deepseekocr/sam.py:431)"
)
_CLIP = (
    "CLIP's positions are resized for such pictures, as published; mlx-vlm hands (1, D, H, W) to a function for "
    "(1, H, W, D), which resizes other axes and scrambles the table (models/base.py:570, deepseekocr/vision.py:132)",
    "CLIP's layers have the sigmoid's GELU and norms with an epsilon of 1e-5, as published (deepencoder.py, quick_gelu and "
    "vit_model_cfg); mlx-vlm takes the exact GELU (deepseekocr/vision.py:56) and 1e-6 (deepseekocr/config.py:60)",
)


class SamOCR(MaskedPositions):
    """``pixel_values`` lists crops (N, 3, H, W) and whole pictures (M, 3, H, W)."""

    tower_class = RememberingBatchTower

    #: Notes for the specs of these families.
    notes: ClassVar[tuple[str, ...]] = (_SAM_POSITIONS,)
    input_keys = frozenset({"pixel_values", "images_seq_mask", "images_spatial_crop"})
    ignored = frozenset({"labels", "sft_format", "seq_lens", "num_image_tokens"})
    patches = patches_in("vlm_batch.models._deepseekocr")

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        self.check_one_picture(extra)
        return super().features(ids, extra)

    def check_one_picture(self, extra: Mapping[str, Any]) -> None:
        crops = (
            np.array(extra["images_spatial_crop"])
            if "images_spatial_crop" in extra
            else np.zeros((0, 2))
        )
        if not self.spec.multi_image and len(crops) > 1:
            raise InvalidPrompt(
                f"{self.spec.family} takes one picture a request: it fills one picture's placeholders"
            )


@register(
    ModelSpec(
        family="deepseekocr",
        model_types=("deepseekocr",),
        special_tokens=(
            (
                "<|det|>",
                "grounding is <|ref|>name<|/ref|><|det|>[[x1, y1, x2, y2]]<|/det|>, cells are <td>; the authors "
                "decode with skip_special_tokens=False (run_dpsk_ocr_image.py, vLLM's recipe)",
            ),
        ),
        multi_image=False,
        notes=(*SamOCR.notes, *_CLIP),
    )
)
class DeepseekOCR(SamOCR):
    """One picture a request: mlx-vlm seeks the second elsewhere (deepseekocr.py:295)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        # as deepencoder.py has it
        for layer in self.model.vision_model.transformer.layers:
            layer.layer_norm1.eps = layer.layer_norm2.eps = 1e-5
            layer.mlp.activation_fn = nn.GELU(approx="fast")
