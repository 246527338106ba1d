"""DeepSeek-VL2, DeepSeek-OCR, DeepSeek-OCR-2 and Unlimited-OCR: latent or plain attention, experts, pictures in tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.caches.retained import RetainedPromptCache
from vlm_batch.errors import InvalidPrompt
from vlm_batch.models.base import Adapter
from vlm_batch.registry import ModelSpec, register
from vlm_batch.types import Encoded


@register(
    ModelSpec(
        family="deepseek_vl_v2",
        model_types=("deepseek_vl_v2",),
        notes=(
            "experts chosen with a correction bias (noaux_tc) are chosen by score and bias, for each token of each row, "
            "as in DeepSeek's code and mlx-vlm's deepseekocr; mlx-vlm's deepseek_vl_v2 leaves the bias out and mixes "
            "rows (deepseek_vl_v2/language.py:336-366)",
            "the pictures' tile counts end in zeros: mlx-vlm reads as many of them as there are tiles, past their end "
            "(deepseek_vl_v2/deepseek_vl_v2.py:333), and takes what lies in memory there for a count",
        ),
    )
)
class DeepseekVL2(Adapter):
    """Tiles of all pictures lie in one (1, N, 3, H, W) array; a text has one of zeros."""

    input_keys = Adapter.input_keys | {"images_seq_mask", "images_spatial_crop"}
    ignored_inputs = frozenset({"labels", "sft_format", "seq_lens"})

    @classmethod
    def mends(cls) -> Mapping[type, type]:
        from mlx_vlm.models.deepseek_vl_v2.language import MoEGate

        class RowGate(MoEGate):
            """Upstream broadcasts rows against each other and leaves the bias out (language.py:336-366); DeepSeek's
            MoEGate picks groups and experts by score and bias, and weighs them by the score (modeling_deepseek.py)."""

            def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
                """(B, L, D) -> experts and their weights (B, L, K)"""
                if self.topk_method != "noaux_tc":
                    return super().__call__(x)
                gates = x @ self.weight.T
                scores = mx.sigmoid(gates) if self.scoring_func == "sigmoid" else mx.softmax(gates, -1, precise=True)
                choice = scores + self.e_score_correction_bias
                if self.topk_group < self.n_group:
                    grouped = mx.unflatten(choice, -1, (self.n_group, -1))
                    ranks = mx.topk(grouped, 2, axis=-1).sum(axis=-1, keepdims=True)
                    dropped = mx.argpartition(ranks, self.n_group - self.topk_group - 1, axis=-2)
                    dropped = dropped[..., : self.n_group - self.topk_group, :]
                    choice = mx.put_along_axis(grouped, dropped, mx.array(0.0), axis=-2).flatten(-2)
                experts = mx.argpartition(-choice, self.top_k - 1, axis=-1)[..., : self.top_k]
                return experts, mx.take_along_axis(scores, experts, axis=-1) * self.routed_scaling_factor

        return {MoEGate: RowGate}

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Upstream's own, with a count for everything that it reads one of."""
        if "images_spatial_crop" not in extra:
            return super().features(ids, extra)
        crops = extra["images_spatial_crop"]  # (1, pictures, 2)
        missing = max(0, extra["pixel_values"].shape[1] - crops.shape[1])
        return super().features(ids, {**extra, "images_spatial_crop": mx.pad(crops, [(0, 0), (0, missing), (0, 0)])})


class _OCR(Adapter):
    """``pixel_values`` is a list: the crops (N, 3, H, W) of all pictures, and the pictures (M, 3, H, W) whole."""

    input_keys = frozenset({"pixel_values", "images_seq_mask", "images_spatial_crop"})
    ignored_inputs = frozenset({"labels", "sft_format", "seq_lens", "num_image_tokens"})

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Upstream's own, for as many pictures as it has room for."""
        crops = np.array(extra["images_spatial_crop"]) if "images_spatial_crop" in extra else np.zeros((0, 2))
        if not self.spec.multi_image and len(crops) > 1:
            raise InvalidPrompt(f"{self.spec.family} takes one picture a request: it fills one picture's placeholders")
        return super().features(ids, extra)


@register(ModelSpec(family="deepseekocr", model_types=("deepseekocr",), multi_image=False))
class DeepseekOCR(_OCR):
    """One picture a request: mlx-vlm looks for the second one's placeholders in a second row (deepseekocr.py:295)."""


@register(ModelSpec(family="deepseekocr_2", model_types=("deepseekocr_2",), multi_image=False))
class DeepseekOCR2(_OCR):
    """One picture a request: mlx-vlm fills the first picture's crops only (deepseekocr_2.py:95)."""


@register(
    ModelSpec(
        family="unlimited_ocr",
        model_types=("unlimited_ocr",),
        notes=(
            "all of the prompt stays in sight, beside the last tokens of the answer: mlx-vlm takes the first single "
            "token that it runs for the answer's, which is the prompt's last (unlimited_ocr/language.py:38)",
        ),
    )
)
class UnlimitedOCR(_OCR):
    """An answer's tokens see the prompt and a window of the answer."""

    def make_cache(self) -> list[Any]:
        text = self.config.text_config
        window = text.sliding_window_size or text.sliding_window
        return super().make_cache() if window is None else [RetainedPromptCache(window) for _ in self.language.layers]

    def finish_prefill(self, encoded: Encoded, cache: list[Any]) -> None:
        for single in cache:
            if isinstance(single, RetainedPromptCache):
                single.end_prompt()
