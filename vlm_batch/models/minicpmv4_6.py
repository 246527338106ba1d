"""MiniCPM-V 4.6 and 4.7: Qwen3.5's text model, with and without experts, and pictures in slices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.frames import every_frame_kept
from vlm_batch.adapters.grids import MRoPEAdapter
from vlm_batch.inputs.videos import Sampling
from vlm_batch.models.qwen2_vl import Qwen35
from vlm_batch.registry import ModelSpec, register
from vlm_batch.types import Picture, PositionState, Video


@dataclass(frozen=True, kw_only=True)
class EachSecond(Sampling):
    """The frame of each second, or as many as may be, evenly, of each tenth (transformers: MiniCPMV4_6VideoProcessor)."""

    def indices(self, total: int, fps: float, video: Video) -> np.ndarray:
        if video.fps is not None or video.num_frames is not None:
            return super().indices(total, fps, video)
        seconds, most = total / fps, video.max_frames or self.max_frames
        if seconds <= most:
            return (np.arange(math.ceil(seconds)) * fps).astype(int)
        tenths = np.minimum((np.round(np.arange(int(seconds / 0.1)) * 0.1, 1) * fps).astype(int), total - 1)
        return tenths[np.linspace(0, len(tenths) - 1, most, dtype=int)] if len(tenths) > most else tenths


class SlicedAdapter(MRoPEAdapter):
    """Pictures in slices, whose tokens lie between bounds; positions are the count of tokens on all three axes."""

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Upstream's own, which checks itself that every slice has its tokens."""
        return Adapter.features(self, ids, extra)

    def positions(self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]) -> PositionState:
        return PositionState(prompt=mx.broadcast_to(mx.arange(ids.shape[1], dtype=mx.int32), (3, 1, ids.shape[1])))

    def count_image_tokens(self, ids: mx.array, extra: Mapping[str, Any]) -> int:
        return sum(int((bounds[:, 1] - bounds[:, 0]).sum()) for bounds in slice_bounds(extra))

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        """All slices are one, from the first one's tokens to the last one's."""
        found = slice_bounds(extra)
        if not found:
            return super().pictures(ids, extra)
        bounds = np.concatenate(found)
        return (Picture(int(bounds.min()), int(bounds.max()), extra),) if len(bounds) else ()

    def model_image_sizes(self, extra: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        """Unknown: what the processor says are its slices."""
        return ()


def slice_bounds(extra: Mapping[str, Any]) -> list[np.ndarray]:
    """[first, end) of each slice's tokens (slices, 2); none where the processor does not say."""
    return [np.array(bounds).reshape(-1, 2) for bounds in extra.get("image_bound", ())]


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
    """All tokens count, pictures' too. A video's frames come as pictures with other placeholders."""

    video_sampling = EachSecond(fps=1.0, min_frames=1, max_frames=128, frame_factor=1)
    input_keys = frozenset({"pixel_values", "tgt_sizes", "image_bound", "downsample_mode", "cached_image_features"})
    ignored_inputs = frozenset(
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
    def video_processor(cls, part: Any) -> Any:
        return every_frame_kept(part)

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for block in self.model.merger.mlp:
            block.act = nn.GELU()


@register(
    ModelSpec(
        family="minicpmv4_7",
        model_types=("minicpmv4_7",),
        video=True,
        notes=("positions and the merger's GELU: as minicpmv4_6",),
    )
)
class MiniCPMV47(MiniCPMV46):
    """The slices of a picture share a canvas, which gives their tokens positions on three axes."""

    ignored_inputs = MiniCPMV46.ignored_inputs | {"image_bound"}
    input_keys = MiniCPMV46.input_keys - {"image_bound"}

    def features_after(self, ids: mx.array, extra: Mapping[str, Any], cached: int) -> dict[str, Any]:
        """The whole prompt's: the positions of its rest come with them."""
        return self.features(ids, extra)

    def positions(self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]) -> PositionState:
        prompt, delta = features["position_ids"], features["rope_deltas"]
        return PositionState(prompt=prompt.astype(mx.int32), delta=int(delta.item()))

    def count_image_tokens(self, ids: mx.array, extra: Mapping[str, Any]) -> int:
        return Adapter.count_image_tokens(self, ids, extra)
