"""MiniCPM-V 4.6: slices before Qwen3.5's decoder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.frames import keep_every_frame
from vlm_batch.adapters.modules import RememberingGridTower, unshared
from vlm_batch.adapters.slices import SlicedAdapter
from vlm_batch.inputs.videos import Sampling
from vlm_batch.models.qwen3_5 import Qwen35
from vlm_batch.registry import ModelSpec, register
from vlm_batch.types import Video


@dataclass(frozen=True, kw_only=True)
class FramePerSecond(Sampling):
    """Samples at most a frame per second (transformers, MiniCPMV4_6VideoProcessor)."""

    def indices(self, total: int, fps: float, video: Video) -> np.ndarray:
        if video.fps is not None or video.num_frames is not None:
            return super().indices(total, fps, video)
        seconds, most = total / fps, video.max_frames or self.max_frames
        if seconds <= most:
            return (np.arange(math.ceil(seconds)) * fps).astype(int)
        tenths = np.minimum(
            (np.round(np.arange(int(seconds / 0.1)) * 0.1, 1) * fps).astype(int),
            total - 1,
        )
        return (
            tenths[np.linspace(0, len(tenths) - 1, most, dtype=int)]
            if len(tenths) > most
            else tenths
        )


@register(
    ModelSpec(
        family="minicpmv4_6",
        model_types=("minicpmv4_6",),
        video=True,
        notes=(
            "positions travel with the row: mlx-vlm keeps the last request's on the model (minicpmv4_6.py, "
            "_set_position_state)",
            "the merger after the tower takes the exact GELU, as in transformers (MiniCPMV4_6DownsampleMLP); mlx-vlm takes "
            "its tanh form (minicpmv4_6.py, MergerBlock)",
        ),
    )
)
class MiniCPMV46(SlicedAdapter, Qwen35):
    merge = None
    tower_class = unshared(
        RememberingGridTower,
        "mlx-vlm's code calls the tower's parts, and not the tower",
    )
    video_sampling = FramePerSecond(
        fps=1.0, min_frames=1, max_frames=128, frame_factor=1
    )
    input_keys = frozenset(
        {
            "pixel_values",
            "tgt_sizes",
            "image_bound",
            "downsample_mode",
            "cached_image_features",
        }
    )
    ignored = frozenset(
        {
            "grids",
            "grids_videos",
            "num_frames_per_video",
            "num_patches_per_frame",
            "num_patches_per_image",
            "video_sizes",
        }
    )

    @classmethod
    def processor(cls, processor: Any) -> Any:
        from mlx_vlm.models.minicpmv4_6.processing_minicpmv4_6 import (
            MiniCPMVVideoProcessor,
        )

        return keep_every_frame(
            super().processor(processor), MiniCPMVVideoProcessor, "max_num_frames"
        )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for block in self.model.merger.mlp:
            block.act = nn.GELU()
