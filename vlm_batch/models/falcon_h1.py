"""Falcon-H1: a text model with Mamba-2 and attention side by side in every layer."""

from __future__ import annotations

from vlm_batch.adapters.base import Adapter
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="falcon_h1", model_types=("falcon_h1",), images=False, multi_image=False))
class FalconH1(Adapter):
    """Mamba-2 and attention side by side in every layer, each with a cache of its own. Pictures are refused."""

    input_keys = frozenset()
