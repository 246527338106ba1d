"""Kimi K2.5: MoonViT before DeepSeek-V3's decoder."""

from __future__ import annotations

from vlm_batch.adapters.latent import latent_attention
from vlm_batch.adapters.modules import RememberingPackedTower, patching
from vlm_batch.adapters.placing import Merge
from vlm_batch.adapters.routing import dropped_groups
from vlm_batch.adapters.towers import resized_positions
from vlm_batch.models.kimi_vl import Kimi
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="kimi_k25",
        model_types=("kimi_k25",),
        notes=(
            "MoonViT's GELU has its tanh form, as in transformers (configuration_kimi_k25.py, hidden_act); mlx-vlm takes the "
            "exact one (kimi_k25/vision.py:245)",
            "positions are resized by PyTorch's rule; without Metal mlx-vlm takes what lies past an edge for zeros "
            "(mlx_vlm/models/kernels.py:165)",
            "a dropped group of experts is out of the choice, as in DeepSeek-V3 and transformers; mlx-vlm gives it a score of "
            "zero, which beats a kept expert of less (deepseek_v3/language.py:167); published checkpoints have one group",
        ),
    )
)
class KimiK25(Kimi):
    merge = Merge("_prepare_inputs_for_multimodal", keeps_type=True, takes_all=True)
    last_hidden = "model.norm"
    tower_class = RememberingPackedTower
    patches = patching(
        ("deepseek_v3.language.DeepseekV3Attention", latent_attention),
        ("deepseek_v3.language.MoEGate", dropped_groups),
        ("kimi_k25.vision.Learnable2DInterpPosEmb", resized_positions),
    )
