"""Qwen2-VL's bound on video frames, one by one, in the place of Qwen3-VL's on the whole video."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import (
    Qwen3VLVideoProcessor,
    _resize_video_frames,
    _smart_resize_image,
)

#: The most pixels of one frame in Qwen2-VL's published video settings (transformers, Qwen2VLVideoProcessor.size). Its
#: checkpoints' preprocessor_config.json bounds pictures, at twenty times as much.
MAX_FRAME_PIXELS = 768 * 28 * 28
#: The most pixels of all frames together there: 90 % of 128,000 tokens (``cap_pixels_per_frame``), two frames to a token.
MAX_FRAMES_PIXELS = int(128_000 * 28 * 28 * 0.9) * 2


def each_frame_bounded(part: Any) -> Any:
    """A copy of Qwen's video processor that bounds frames as Qwen2-VL does; any other part as it is."""
    if type(part) is not Qwen3VLVideoProcessor:
        return part
    bounded = copy.copy(part)
    bounded.__class__ = FrameBoundedVideoProcessor
    return bounded


class FrameBoundedVideoProcessor(Qwen3VLVideoProcessor):
    """``min_pixels`` and ``max_pixels`` are a frame's, not the whole video's (transformers: video_processing_qwen2_vl.py)."""

    def _process_one(self, video: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """(T, 3, H, W) -> patches (t * h * w, 3 * 2 * patch * patch) and (t, h, w)."""
        frames, _, height, width = video.shape
        most = max(min(self.max_pixels, MAX_FRAME_PIXELS, MAX_FRAMES_PIXELS // frames), int(self.min_pixels * 1.05))
        factor = self.patch_size * self.merge_size
        high, wide = _smart_resize_image(height, width, factor, self.min_pixels, most)
        whole = copy.copy(self)
        whole.min_pixels, whole.max_pixels = 0, frames * high * wide * 2
        return Qwen3VLVideoProcessor._process_one(whole, _resize_video_frames(video, high, wide))
