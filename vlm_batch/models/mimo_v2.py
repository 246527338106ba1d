"""MiMo-V2: sliding layers with attention sinks, full ones without, experts (pictures and text)."""

from __future__ import annotations

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingPackedTower
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="mimo_v2",
        model_types=("mimo_v2",),
        no_video="not verified: transformers has no such model to compare with",
        notes=(
            "audio and video are not verified, and refused",
            "a window of sliding_window_size counts the token itself, as in mlx-vlm and vLLM; transformers' MiMoV2Flash adds "
            "one (configuration_mimo_v2_flash.py)",
        ),
    )
)
class MiMoV2(Adapter):
    """RoPE takes each row's own offset; the caches keep the windows, and the attention knows its sinks."""

    tower_class = RememberingPackedTower
    input_keys = Adapter.input_keys | {"image_grid_thw"}
