"""Youtu-VL: windows in the vision tower, attention over a latent, experts."""

from __future__ import annotations

from collections.abc import Mapping

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.latent import latent_attention
from vlm_batch.adapters.routing import dropped_groups
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="youtu_vl",
        model_types=("youtu_vl",),
        notes=("a dropped group of experts is out of the choice, as for kimi_k25 (youtu_vl/language.py:186)",),
    )
)
class YoutuVL(Adapter):
    """Latent attention; windows in the vision tower."""

    input_keys = frozenset({"pixel_values", "spatial_shapes"})
    ignored_inputs = frozenset({"pixel_attention_mask"})

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.youtu_vl.language import MoEGate, YoutuAttention

        return {YoutuAttention: latent_attention(YoutuAttention), MoEGate: dropped_groups(MoEGate)}
