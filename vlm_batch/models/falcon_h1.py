"""Falcon-H1: text only, Mamba-2 beside attention in every layer."""

from __future__ import annotations

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import patching
from vlm_batch.adapters.recurrent import in_order
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="falcon_h1", model_types=("falcon_h1",), images=False, multi_image=False
    )
)
class FalconH1(Adapter):
    _masks_states = True
    input_keys = frozenset()
    patches = patching(
        (
            "falcon_h1.language.FalconH1Mixer",
            lambda mixer: in_order(mixer, ("in_proj",), "out_proj"),
        )
    )
