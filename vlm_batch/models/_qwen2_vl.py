"""Qwen2-VL's bound per video frame; mlx-vlm bounds whole videos."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import (
    Qwen3VLVideoProcessor,
    _resize_video_frames,
    _smart_resize_image,
)

#: Most pixels of a frame in Qwen2-VL's published video settings (transformers, Qwen2VLVideoProcessor.size). The bound in
#: preprocessor_config.json is for pictures, and twenty times as large.
MAX_FRAME_PIXELS = 768 * 28 * 28
#: Most pixels of all frames: 90 % of 128,000 tokens (``cap_pixels_per_frame``), two frames to a token.
MAX_FRAMES_PIXELS = int(128_000 * 28 * 28 * 0.9) * 2


def each_frame_bounded(part: Any) -> Any:
    if type(part) is not Qwen3VLVideoProcessor:
        return part
    bounded = copy.copy(part)
    bounded.__class__ = FrameBoundedVideoProcessor
    return bounded


class FrameBoundedVideoProcessor(Qwen3VLVideoProcessor):
    """Bounds pixels per frame (transformers, video_processing_qwen2_vl.py)."""

    def _process_one(self, video: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """(T, 3, H, W) -> patches (t * h * w, 3 * 2 * patch * patch), (t, h, w)."""
        frames, _, height, width = video.shape
        most = max(
            min(self.max_pixels, MAX_FRAME_PIXELS, MAX_FRAMES_PIXELS // frames),
            int(self.min_pixels * 1.05),
        )
        factor = self.patch_size * self.merge_size
        high, wide = _smart_resize_image(height, width, factor, self.min_pixels, most)
        whole = copy.copy(self)
        whole.min_pixels, whole.max_pixels = 0, frames * high * wide * 2
        return Qwen3VLVideoProcessor._process_one(
            whole, _resize_video_frames(video, high, wide)
        )
