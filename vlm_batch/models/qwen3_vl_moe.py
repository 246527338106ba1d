"""Qwen3-VL with experts."""

from __future__ import annotations

import mlx.nn as nn

from vlm_batch.adapters.attention import seal_masks
from vlm_batch.adapters.deepstack import HostPositions
from vlm_batch.adapters.modules import patching, under
from vlm_batch.adapters.placing import Merge
from vlm_batch.adapters.towers import embed_by_product
from vlm_batch.adapters.windows import attend_pictures
from vlm_batch.models.qwen3_vl import Qwen3VL
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="qwen3_vl_moe",
        model_types=("qwen3_vl_moe",),
        video=True,
        notes=(
            "the vision blocks take the tanh form of GELU and the mergers the exact one, as in transformers; mlx-vlm has "
            "them the other way round (qwen3_vl_moe/vision.py:109 and :164)",
        ),
    )
)
class Qwen3VLMoe(Qwen3VL):
    merge = Merge(
        "merge_input_ids_with_image_features",
        keeps_type=True,
        takes_all=True,
        gives_mask=True,
    )
    patches = patching(
        # cut to the longest row at qwen3_vl_moe/language.py:107
        ("qwen3_vl_moe.language.Attention", seal_masks),
        ("qwen3_vl_moe.vision.Attention", attend_pictures),
        ("qwen3_vl_moe.vision.PatchEmbed", embed_by_product),
        ("qwen3_vl_moe.vision.VisionModel", under(HostPositions)),
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        # transformers: Qwen3VLMoeVisionMLP takes hidden_act, gelu_pytorch_tanh; Qwen3VLMoeVisionPatchMerger nn.GELU().
        tower = self.model.vision_tower
        for block in tower.blocks:
            if type(block.mlp.act_fn) is nn.GELU:  # not one that config.json names
                block.mlp.act_fn = nn.GELU(approx="tanh")
        for merger in (tower.merger, *tower.deepstack_merger_list):
            merger.act_fn = nn.GELU()
