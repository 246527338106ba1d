"""DeepSeek-VL2: latent or plain attention, experts, tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.adapters.modules import RememberingBatchTower, patches_in
from vlm_batch.adapters.placeholders import MaskedPositions
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="deepseek_vl_v2",
        model_types=("deepseek_vl_v2",),
        special_tokens=(
            (
                "<|det|>",
                "grounding is <|ref|>name<|/ref|><|det|>[[x1, y1, x2, y2]]<|/det|>; the authors' inference.py "
                "decodes with skip_special_tokens=False",
            ),
        ),
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
class DeepseekVL2(MaskedPositions):
    """Tiles are one (1, N, 3, H, W) array, zeros for a text."""

    tower_class = RememberingBatchTower
    input_keys = MaskedPositions.input_keys | {"images_seq_mask", "images_spatial_crop"}
    ignored = frozenset({"labels", "sft_format", "seq_lens"})
    patches = patches_in("vlm_batch.models._deepseek_vl_v2")

    def __init__(self, model: nn.Module) -> None:
        from mlx_vlm.models.deepseek_vl_v2.language import DeepseekV2Attention

        super().__init__(model)
        # as modeling_deepseek.py has it
        for _, module in self.language.named_modules():
            if isinstance(module, DeepseekV2Attention):
                if isinstance(module.rope, nn.RoPE):
                    module.rope.traditional = True
                for name in {"q_a_layernorm", "kv_a_layernorm"} & module.keys():
                    module[name].eps = 1e-6

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        if "images_spatial_crop" not in extra:
            return super().features(ids, extra)
        crops = extra["images_spatial_crop"]  # (1, pictures, 2)
        missing = max(0, extra["pixel_values"].shape[1] - crops.shape[1])
        return super().features(
            ids,
            {
                **extra,
                "images_spatial_crop": mx.pad(crops, [(0, 0), (0, missing), (0, 0)]),
            },
        )
