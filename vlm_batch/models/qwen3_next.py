"""Qwen3-Next: text only, gated delta nets, experts."""

from __future__ import annotations

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import patches_in
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="qwen3_next",
        model_types=("qwen3_next",),
        images=False,
        multi_image=False,
        notes=(
            "the epsilon of queries' and keys' L2 norms is added to the sum of squares, as in transformers (l2norm); mlx-vlm "
            "adds it to their mean (qwen3_next/language.py:239), and to the sum in qwen3_5",
        ),
    )
)
class Qwen3Next(Adapter):
    _masks_states = True
    input_keys = frozenset()
    patches = patches_in("vlm_batch.models._qwen3_next")
