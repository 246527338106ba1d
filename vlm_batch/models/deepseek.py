"""DeepSeek-VL2, DeepSeek-OCR, DeepSeek-OCR-2 and Unlimited-OCR: latent or plain attention, experts, pictures in tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.deepseek_vl_v2.language import DeepseekV2Attention
from mlx_vlm.models.kernels import bicubic_interpolate

from vlm_batch.adapters.base import Adapter
from vlm_batch.caches.retained import RetainedPromptCache
from vlm_batch.errors import InvalidPrompt
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
            "latent attention turns neighbours of a head, as in DeepSeek's code and transformers (DeepseekV2); mlx-vlm turns "
            "halves where the configuration has no rope_scaling (deepseek_vl_v2/language.py:150), and gives the latents' norms "
            "an epsilon of 1e-5 for 1e-6 (deepseek_vl_v2/language.py:123)",
        ),
    )
)
class DeepseekVL2(Adapter):
    """Tiles of all pictures lie in one (1, N, 3, H, W) array; a text has one of zeros."""

    input_keys = Adapter.input_keys | {"images_seq_mask", "images_spatial_crop"}
    ignored_inputs = frozenset({"labels", "sft_format", "seq_lens"})

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for _, module in self.language.named_modules():  # as modeling_deepseek.py has it
            if isinstance(module, DeepseekV2Attention):
                if isinstance(module.rope, nn.RoPE):
                    module.rope.traditional = True
                for name in {"q_a_layernorm", "kv_a_layernorm"} & module.keys():
                    module[name].eps = 1e-6

    @classmethod
    def patches(cls) -> Mapping[type, type]:
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
                    choice = mx.put_along_axis(grouped, dropped, mx.array(-mx.inf), axis=-2).flatten(-2)
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


def resize_linear(table: mx.array, length: int) -> mx.array:
    """A table (L, D) for another length, as ``F.interpolate(mode="linear")`` does without aligned corners."""
    places = mx.clip((mx.arange(length) + 0.5) * (len(table) / length) - 0.5, 0, len(table) - 1)
    before = mx.floor(places).astype(mx.int32)
    share = (places - before)[:, None]
    return (table[before] * (1 - share) + table[mx.minimum(before + 1, len(table) - 1)] * share).astype(table.dtype)


def _sam() -> Mapping[type, type]:
    from mlx_vlm.models.deepseekocr.sam import Attention

    class RelativeAttention(Attention):
        """Upstream stretches the tables of relative positions without torch's half step (sam.py, get_rel_pos)."""

        def __call__(self, x: mx.array) -> mx.array:
            """(B, H, W, D) -> the same"""
            batch, high, wide, _ = x.shape
            if not self.use_rel_pos or (len(self.rel_pos_h), len(self.rel_pos_w)) == (2 * high - 1, 2 * wide - 1):
                return super().__call__(x)
            split = self.qkv(x).reshape(batch, high * wide, 3, self.num_heads, -1)
            queries, keys, values = split.transpose(2, 0, 3, 1, 4)  # (B, heads, H W, D_head) each
            cells = queries.reshape(batch, self.num_heads, high, wide, -1)
            down = mx.einsum("bnhwd,hkd->bnhwk", cells, relative(self.rel_pos_h, high))[..., None]
            across = mx.einsum("bnhwd,wkd->bnhwk", cells, relative(self.rel_pos_w, wide))[..., None, :]
            bias = (down + across).reshape(batch, self.num_heads, high * wide, high * wide)
            out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=bias)
            return self.proj(out.swapaxes(1, 2).reshape(batch, high, wide, -1))

    def relative(table: mx.array, side: int) -> mx.array:
        """(side, side, D): what a place on a side adds for each other place."""
        places = mx.arange(side)
        return resize_linear(table, 2 * side - 1)[places[:, None] - places + side - 1]

    return {Attention: RelativeAttention}


def _clip() -> Mapping[type, type]:
    from mlx_vlm.models.deepseekocr.vision import VisionEmbeddings

    class ResizedEmbeddings(VisionEmbeddings):
        """Positions for another grid by the published rule: bicubic with antialiasing (deepencoder.py, get_abs_pos)."""

        def _get_abs_pos(self, abs_pos: mx.array, tgt_size: int) -> mx.array:
            """(1, 1 + H W, D) of the class token and the grid -> (1, tgt_size, D)"""
            old, new = (int((size - 1) ** 0.5) for size in (abs_pos.shape[1], tgt_size))
            if old == new:
                return abs_pos
            grid = abs_pos[:, 1:].reshape(1, old, old, -1).transpose(0, 3, 1, 2)
            resized = bicubic_interpolate(grid.astype(mx.float32), size=(new, new), antialias=True)
            return mx.concatenate([abs_pos[:, :1], resized.flatten(2).swapaxes(1, 2).astype(abs_pos.dtype)], axis=1)

    return {VisionEmbeddings: ResizedEmbeddings}


class _OCR(Adapter):
    """``pixel_values`` is a list: the crops (N, 3, H, W) of all pictures, and the pictures (M, 3, H, W) whole."""

    input_keys = frozenset({"pixel_values", "images_seq_mask", "images_spatial_crop"})
    ignored_inputs = frozenset({"labels", "sft_format", "seq_lens", "num_image_tokens"})

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        return {**_sam(), **_clip()}

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Upstream's own, for as many pictures as it has room for."""
        crops = np.array(extra["images_spatial_crop"]) if "images_spatial_crop" in extra else np.zeros((0, 2))
        if not self.spec.multi_image and len(crops) > 1:
            raise InvalidPrompt(f"{self.spec.family} takes one picture a request: it fills one picture's placeholders")
        return super().features(ids, extra)


class _ClipOCR(_OCR):
    """Behind SAM stands CLIP."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for layer in self.model.vision_model.transformer.layers:  # as deepencoder.py has it
            layer.layer_norm1.eps = layer.layer_norm2.eps = 1e-5
            layer.mlp.activation_fn = nn.GELU(approx="fast")


@register(
    ModelSpec(family="deepseekocr", model_types=("deepseekocr",), multi_image=False, notes=(_SAM_POSITIONS, *_CLIP))
)
class DeepseekOCR(_ClipOCR):
    """One picture a request: mlx-vlm looks for the second one's placeholders in a second row (deepseekocr.py:295)."""


@register(ModelSpec(family="deepseekocr_2", model_types=("deepseekocr_2",), multi_image=False, notes=(_SAM_POSITIONS,)))
class DeepseekOCR2(_OCR):
    """One picture a request: mlx-vlm fills the first picture's crops only (deepseekocr_2.py:95)."""


@register(
    ModelSpec(
        family="unlimited_ocr",
        model_types=("unlimited_ocr",),
        notes=(
            "all of the prompt stays in sight, beside the last tokens of the answer: mlx-vlm takes the first single "
            "token that it runs for the answer's, which is the prompt's last (unlimited_ocr/language.py:38)",
            _SAM_POSITIONS,
            *_CLIP,
        ),
    )
)
class UnlimitedOCR(_ClipOCR):
    """An answer's tokens see the prompt and a window of the answer."""

    def make_cache(self) -> list[Any]:
        text = self.config.text_config
        window = text.sliding_window_size or text.sliding_window
        return super().make_cache() if window is None else [RetainedPromptCache(window) for _ in self.language.layers]

    def finish_prefill(self, encoded: Encoded, cache: list[Any]) -> None:
        for single in cache:
            if isinstance(single, RetainedPromptCache):
                single.end_prompt()
