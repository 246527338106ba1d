"""Moondream 3: Moondream 2 with tau and experts."""

from __future__ import annotations

from vlm_batch.adapters.modules import patches_in
from vlm_batch.models.moondream2 import Moondream2
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="moondream3",
        model_types=("moondream3",),
        multi_image=False,
        notes=(
            *Moondream2.spec.notes,
            "tau and RoPE take each row's own position, without reading offsets back (moondream3/language.py:116)",
        ),
    )
)
class Moondream3(Moondream2):
    patches = patches_in("vlm_batch.models._moondream3")
