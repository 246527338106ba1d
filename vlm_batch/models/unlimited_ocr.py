"""Unlimited-OCR: DeepSeek-OCR whose answers see a window of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.media import has_pictures
from vlm_batch.caches.retained import RetainedPromptCache
from vlm_batch.errors import InvalidPrompt
from vlm_batch.models.deepseekocr import DeepseekOCR
from vlm_batch.records import Encoded
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="unlimited_ocr",
        model_types=("unlimited_ocr",),
        special_tokens=(
            (
                "<|det|>",
                "as deepseekocr; docling 2.143 asks for skip_special_tokens=False, or the page comes back as flat "
                "text (stage_model_specs.py)",
            ),
        ),
        notes=(
            "all of the prompt stays in sight, beside the last tokens of the answer: mlx-vlm takes the first single "
            "token that it runs for the answer's, which is the prompt's last (unlimited_ocr/language.py:38)",
            *DeepseekOCR.spec.notes,
        ),
    )
)
class UnlimitedOCR(DeepseekOCR):
    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Refuse placeholders that mlx-vlm leaves empty (unlimitedocr.py:176)."""
        found = super().features(ids, extra)
        if has_pictures(extra):
            positions = mx.array(
                np.flatnonzero(np.isin(np.array(ids)[0], list(self.image_token_ids)))
            )
            empty = self.token_table(ids[0, positions])
            needed = int(
                (found["inputs_embeds"][0, positions] != empty).any(axis=-1).sum()
            )
            if needed != positions.size:
                raise InvalidPrompt(
                    f"the pictures need {needed} placeholder tokens; the prompt has {positions.size}"
                )
        return found

    def row_caches(self) -> list[Any]:
        text = self.config.text_config
        window = text.sliding_window_size or text.sliding_window
        return (
            super().row_caches()
            if window is None
            else [RetainedPromptCache(window) for _ in self.language.layers]
        )

    def finish_prefill(self, encoded: Encoded, cache: list[Any]) -> None:
        for single in cache:
            if isinstance(single, RetainedPromptCache):
                single.end_prompt()
