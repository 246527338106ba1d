"""Qwen3-Omni (the thinker): pictures and text in, text out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import mlx.nn as nn

from vlm_batch.adapters.attention import seal_masks
from vlm_batch.adapters.grids import GridAdapter, MRoPEAdapter
from vlm_batch.adapters.towers import embed_by_product
from vlm_batch.adapters.windows import attend_pictures
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="qwen3_omni_moe",
        model_types=("qwen3_omni_moe",),
        no_video="a video's positions are fractions of seconds in the published model (modeling_qwen3_omni_moe.py, "
        "get_rope_index) and whole frames in mlx-vlm's",
        notes=(
            "pictures and text in, text out; sound and video are refused, and nothing is spoken",
            "the vision blocks take the tanh form of GELU, as configured and as in transformers; mlx-vlm fixes the exact "
            "one (qwen3_omni_moe/vision.py:163)",
        ),
    )
)
class Qwen3OmniMoe(MRoPEAdapter):
    """The thinker of Qwen3-Omni; its deepstack features come expanded to the prompt's positions."""

    input_keys = GridAdapter.input_keys
    prefill_axes: ClassVar[Mapping[str, int | None]] = {"deepstack_visual_embeds": 1}
    #: Says where the features are not zero; the decoder adds them everywhere (qwen3_omni_moe/language.py, _deepstack_process).
    ignored = frozenset({"visual_pos_masks"})

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.config = self.config.thinker_config
        for block in self.model.thinker.vision_tower.blocks:
            block.mlp.act_fn = nn.GELU(approx="tanh")  # transformers: Qwen3OmniMoeVisionMLP takes hidden_act

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.qwen3_omni_moe import vision
        from mlx_vlm.models.qwen3_omni_moe.language import Attention

        sealed = seal_masks(Attention)  # cut to the longest row at qwen3_omni_moe/language.py:123
        return {
            Attention: sealed,
            vision.Attention: attend_pictures(vision.Attention),
            vision.PatchEmbed: embed_by_product(vision.PatchEmbed),
        }
