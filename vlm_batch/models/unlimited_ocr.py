"""Unlimited-OCR: DeepSeek-OCR whose answers see the prompt and a window of themselves."""

from __future__ import annotations

from typing import Any

from vlm_batch.caches.retained import RetainedPromptCache
from vlm_batch.models.deepseekocr import DeepseekOCR
from vlm_batch.records import Encoded
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="unlimited_ocr",
        model_types=("unlimited_ocr",),
        notes=(
            "all of the prompt stays in sight, beside the last tokens of the answer: mlx-vlm takes the first single "
            "token that it runs for the answer's, which is the prompt's last (unlimited_ocr/language.py:38)",
            *DeepseekOCR.spec.notes,
        ),
    )
)
class UnlimitedOCR(DeepseekOCR):
    """An answer's tokens see the prompt and a window of the answer."""

    def make_cache(self) -> list[Any]:
        text = self.config.text_config
        window = text.sliding_window_size or text.sliding_window
        return super().make_cache() if window is None else [RetainedPromptCache(window) for _ in self.language.layers]

    def finish_prefill(self, encoded: Encoded, cache: list[Any]) -> None:
        for single in cache:
            if isinstance(single, RetainedPromptCache):
                single.end_prompt()
