"""DeepSeek-OCR-2: DeepSeek-OCR without CLIP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.prompts import put_features
from vlm_batch.models.deepseekocr import SamOCR
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="deepseekocr_2",
        model_types=("deepseekocr_2",),
        special_tokens=(("<|det|>", "as deepseekocr"),),
        multi_image=False,
        notes=SamOCR.notes,
    )
)
class DeepseekOCR2(SamOCR):
    """One picture a request: mlx-vlm fills in the first's crops only (deepseekocr_2.py:95)."""

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Embed crops, picture and separator, of which mlx-vlm drops some (deepseekocr_2.py:167)."""
        given = extra.get("pixel_values")
        embeds = self.token_table(ids)
        crops, whole = given if isinstance(given, (list, tuple)) else (None, given)
        if whole is None or mx.sum(whole).item() == 0:  # a text's picture is zeros
            return {"inputs_embeds": embeds}
        self.check_one_picture(extra)
        high, wide = np.array(extra["images_spatial_crop"])[0].tolist()
        has_crops = crops is not None and mx.sum(crops).item() != 0
        views = [*(crops[: high * wide] if has_crops else ()), whole[0]]
        rows = [self._view(view[None].transpose(0, 2, 3, 1)) for view in views]
        found = mx.concatenate([*rows, self.model.view_separator[None]])
        return {"inputs_embeds": put_features(embeds, ids, self.image_token_ids, found)}

    def _view(self, pixels: mx.array) -> mx.array:
        return self.model.projector(
            self.model.vision_model(pixels, self.model.sam_model(pixels))
        )[0]
