"""Qwen2-VL: M-RoPE and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlm_batch.adapters.attention import seal_masks
from vlm_batch.adapters.grids import MRoPEAdapter
from vlm_batch.adapters.windows import attend_pictures
from vlm_batch.registry import ModelSpec, register

_BOTH = "a prompt with pictures and videos keeps both; mlx-vlm drops the videos (qwen2_vl.py:27, qwen2_5_vl.py:27)"
_FRAMES = (
    "video frames are bounded in size one by one, as in transformers' Qwen2VLVideoProcessor; mlx-vlm gives these models "
    "Qwen3-VL's bound for the whole video"
)


@register(ModelSpec(family="qwen2_vl", model_types=("qwen2_vl",), video=True, notes=(_BOTH, _FRAMES)))
class Qwen2VL(MRoPEAdapter):
    """M-RoPE and nothing else."""

    compiles = True
    shares_prefill = True

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.qwen2_vl import vision
        from mlx_vlm.models.qwen2_vl.language import Attention

        return {Attention: seal_masks(Attention), vision.Attention: attend_pictures(vision.Attention)}

    @classmethod
    def video_processor(cls, part: Any) -> Any:
        from vlm_batch.models._qwen2_vl import each_frame_bounded

        return each_frame_bounded(part)
