"""Frames of AV1 videos by PyAV, for the FFmpeg in OpenCV's wheels has no decoder for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from vlm_batch.errors import InvalidVideo
from vlm_batch.inputs.fetch import Cancelled
from vlm_batch.inputs.refusals import refused_as
from vlm_batch.inputs.tracks import container_of


class AvCapture:
    """Reads a file's first video track, as ``videos._Capture`` does.

    Args:
        path: An mp4, mov, mkv, webm or avi file.
        name: What messages call it.
        announced: Its frames, as the header says.
        fps: Its frames a second.
        size: (width, height) of the upright frames.

    Raises:
        InvalidVideo: PyAV is not installed, or the file is of another kind or damaged.
    """

    def __init__(
        self, path: Path, name: str, announced: int, fps: float, size: tuple[int, int]
    ) -> None:
        try:
            import av
        except ImportError as error:
            raise InvalidVideo(
                f"{name} is coded as AV1, and PyAV, which decodes it, is not installed",
                advice=': pip install "vlm-batch[sound]"',
            ) from error
        self.announced, self.fps, self.size, self.seen = announced, fps, size, 0
        self._name = name
        self._frame: Any = None
        self._file = open(path, "rb")  # noqa: SIM115  (``close`` closes it)
        with (
            ExitStack() as failing,
            refused_as(InvalidVideo, f"{name} cannot be opened"),
        ):
            failing.callback(self._file.close)
            # a container that is named, behind a file of ours: FFmpeg follows no playlist and opens nothing else
            self._opened = av.open(
                self._file, format=container_of(path), metadata_errors="ignore"
            )
            failing.pop_all()
        self._frames = self._opened.decode(video=0)

    def skip(self) -> bool:
        """Skip one frame; return False at the end."""
        with refused_as(InvalidVideo, f"{self._name} cannot be decoded"):
            self._frame = next(self._frames, None)
        found = self._frame is not None
        self.seen += found
        return found

    def read(self, indices: np.ndarray, cancelled: Cancelled) -> Iterator[np.ndarray]:
        """Yield frames (H, W, 3) at rising indices, until the file ends."""
        for index in indices.tolist():
            while self.seen <= index:
                cancelled.check()
                if not self.skip():
                    return
            frame = self._frame.to_ndarray(format="rgb24")
            yield np.ascontiguousarray(np.rot90(frame, self._frame.rotation // 90))

    def close(self) -> None:
        self._opened.close()
        self._file.close()
