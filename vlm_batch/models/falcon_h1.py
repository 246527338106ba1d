"""Falcon-H1: text only, Mamba-2 beside attention in every layer."""

from __future__ import annotations

from collections.abc import Mapping

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.recurrent import in_order
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="falcon_h1", model_types=("falcon_h1",), images=False, multi_image=False))
class FalconH1(Adapter):
    _masks_states = True
    input_keys = frozenset()

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.falcon_h1.language import FalconH1Mixer

        return {FalconH1Mixer: in_order(FalconH1Mixer, ("in_proj",), "out_proj")}
