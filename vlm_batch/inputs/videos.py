"""Videos from wherever they are to RGB frames: the only place that decodes video files.

Every failure is an InvalidVideo that names the source and what was wrong with it.
"""

from __future__ import annotations

import base64
import binascii
import math
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlm_batch.errors import InvalidImage, InvalidVideo
from vlm_batch.inputs.images import DEFAULT_MAX_PIXELS, URL_TIMEOUT_SECONDS, load_image
from vlm_batch.types import Video, VideoInput

#: The most pixels that the frames of one video may have together: 1.5 GB of RGB, or four minutes of 1080p at 1 frame a second.
DEFAULT_MAX_VIDEO_PIXELS = 500_000_000
#: A file may end this share of its frames (and two) before its header says: headers count by duration. More is damage.
MAX_MISSING_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which frames of a file a family looks at: ``fps`` a second within bounds, or ``num_frames`` of every file.

    The number is rounded down to a multiple of ``frame_factor``, the frames that the model takes as one. They are
    spread from the first frame to the last, or, ``to_the_end`` being false, one at the beginning of each equal part.
    """

    fps: float = 2.0
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    frame_factor: int = 2
    to_the_end: bool = True

    def indices(self, total: int, fps: float, video: Video) -> np.ndarray:
        """The frames (N,) to take of ``total`` at ``fps``, spread evenly from the first to the last."""
        if video.num_frames is not None:
            wanted, most = float(video.num_frames), total
        else:
            wanted, most = self._wanted(total / fps, video.fps), min(video.max_frames or self.max_frames, total)
        number = math.floor(min(wanted, most) / self.frame_factor) * self.frame_factor
        number = number or min(self.frame_factor, most)
        return spread(total, number) if self.to_the_end else np.arange(number) * total // number

    def _wanted(self, seconds: float, fps: float | None) -> float:
        if self.num_frames is not None and fps is None:
            return self.num_frames
        return max(seconds * (fps or self.fps), self.min_frames)


@dataclass(frozen=True)
class Clip:
    """Decoded frames (T, H, W, 3) of uint8, and which of the source's ``total`` frames, at ``fps`` a second, they are."""

    frames: np.ndarray
    indices: tuple[int, ...]
    total: int
    fps: float

    @property
    def size(self) -> tuple[int, int, int]:
        """(frames, width, height)."""
        count, height, width, _ = self.frames.shape
        return count, width, height

    @property
    def sampled_fps(self) -> float:
        """Frames a second of the clip itself; bounds can push it far below what was asked for."""
        return len(self.indices) / self.total * self.fps


def spread(total: int, number: int) -> np.ndarray:
    """``number`` indices, evenly from the first of ``total`` to the last."""
    return np.linspace(0, total - 1, number).round().astype(int)


def as_video(source: VideoInput) -> Video:
    """A video as it is; anything else that can be a source as a ``Video``. Raises InvalidVideo for what cannot be one."""
    video = source if isinstance(source, Video) else Video(source)
    source = video.source
    if isinstance(source, (str, Path, bytes, bytearray, memoryview)):
        return video
    if isinstance(source, Sequence):
        if not source:
            raise InvalidVideo("the video has no frames")
        return video
    if isinstance(source, Image.Image) or np.ndim(source) != 4:
        raise InvalidVideo(
            f"{describe_video(video)} is no video: a file, an array (T, H, W, 3), or frames together as "
            "Video([first, second, ...], fps=2)"
        )
    return video


def load_video(
    video: VideoInput,
    sampling: Sampling | None = None,
    max_pixels: int | None = DEFAULT_MAX_VIDEO_PIXELS,
    max_image_pixels: int | None = DEFAULT_MAX_PIXELS,
) -> Clip:
    """Read a video's frames as RGB, upright, those that the video or else ``sampling`` asks for.

    ``max_pixels`` bounds all frames together and is checked before any is decoded; None lifts it. Raises InvalidVideo.
    """
    video, sampling = as_video(video), sampling or Sampling()
    source = video.source
    if isinstance(source, (str, Path, bytes, bytearray, memoryview)):
        with _file_of(video) as path:
            return _decode(path, video, sampling, max_pixels)
    indices = _thinned(len(source), video)
    pictures = _pictures(video, indices, max_image_pixels)
    return _clip(pictures, video, indices, len(source), video.fps or sampling.fps, max_pixels)


def describe_video(video: Video) -> str:
    """What to call a video in a message."""
    source = video.source
    if isinstance(source, (str, Path)):
        text = str(source)
        return "the video in the data URI" if text.startswith("data:") else text
    if isinstance(source, (bytes, bytearray, memoryview)):
        return "the video given as bytes"
    return f"the video given as {type(source).__name__}"


# Frames that are given one by one
# ---------------------------------------------------------------------------------------------------------------------


def _thinned(total: int, video: Video) -> np.ndarray:
    return spread(total, min(total, video.num_frames or video.max_frames or total))


def _pictures(video: Video, indices: np.ndarray, max_pixels: int | None) -> Iterator[np.ndarray]:
    """Frames (H, W, 3) of uint8, read one at a time."""
    for index in indices.tolist():
        try:
            yield np.asarray(load_image(video.source[index], max_pixels))
        except InvalidImage as error:
            raise InvalidVideo(f"frame {index} of {describe_video(video)}: {error}") from error


def _clip(
    pictures: Iterator[np.ndarray],
    video: Video,
    indices: np.ndarray,
    total: int,
    fps: float,
    max_pixels: int | None,
) -> Clip:
    """As many of the wanted frames as there are, each scaled down to what the video allows."""
    frames: np.ndarray | None = None
    shape: tuple[int, ...] = ()
    count = 0
    for picture in pictures:
        if frames is None:
            shape = picture.shape
            width, height = _scaled(shape[1], shape[0], video.max_pixels)
            _check_pixels(video, len(indices), width, height, max_pixels)
            frames = np.empty((len(indices), height, width, 3), np.uint8)
        if picture.shape != shape:
            raise InvalidVideo(
                f"{describe_video(video)} has frames of {shape[1]} x {shape[0]} and of "
                f"{picture.shape[1]} x {picture.shape[0]} pixels; all must be of one size"
            )
        frames[count] = _resized(picture, frames.shape[2], frames.shape[1])
        count += 1
    if frames is None:
        raise InvalidVideo(f"{describe_video(video)} has no frame that can be decoded")
    return Clip(frames[:count], tuple(indices[:count].tolist()), total, fps)


def _scaled(width: int, height: int, max_pixels: int | None) -> tuple[int, int]:
    if max_pixels is None or width * height <= max_pixels:
        return width, height
    scale = math.sqrt(max_pixels / (width * height))
    return max(1, math.floor(width * scale)), max(1, math.floor(height * scale))


def _resized(picture: np.ndarray, width: int, height: int) -> np.ndarray:
    if picture.shape[:2] == (height, width):
        return picture
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC))


def _check_pixels(video: Video, count: int, width: int, height: int, max_pixels: int | None) -> None:
    if max_pixels is not None and count * width * height > max_pixels:
        raise InvalidVideo(
            f"{describe_video(video)}: {count} frames of {width} x {height} are {count * width * height:,} pixels; at "
            f"most {max_pixels:,} are read (max_video_pixels). Video(..., fps=, max_frames= or max_pixels=) takes less"
        )


# Files
# ---------------------------------------------------------------------------------------------------------------------


def _decode(path: Path, video: Video, sampling: Sampling, max_pixels: int | None) -> Clip:
    """The wanted frames of a file, in one pass from its beginning: seeking is not exact in every format."""
    name = describe_video(video)
    with _opened(path, name) as capture:
        announced, fps = capture.announced, capture.fps
    total = announced if announced > 0 else _count(path, name)
    for _ in range(2):
        if total == 0:
            break
        indices = sampling.indices(total, fps, video)
        with _opened(path, name) as capture:
            clip = _clip(capture.read(indices), video, indices, total, fps, max_pixels)
        if len(clip.indices) == len(indices):
            return clip
        missing = total - capture.seen
        if missing > max(2, MAX_MISSING_SHARE * total):
            raise InvalidVideo(f"{name} is damaged: its header says {total} frames, and it ends after {capture.seen}")
        total = capture.seen
    raise InvalidVideo(f"{name} has no frame that can be decoded")


class _Capture:
    """An open file; frames come in order."""

    def __init__(self, path: Path, name: str) -> None:
        import cv2  # here: only videos need it

        self._cv2, self.seen = cv2, 0
        self._capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
        if not self._capture.isOpened():
            raise InvalidVideo(f"{name} is not a video that FFmpeg can read")
        self.announced = int(self._capture.get(cv2.CAP_PROP_FRAME_COUNT))
        self.fps = float(self._capture.get(cv2.CAP_PROP_FPS))
        if not (math.isfinite(self.fps) and self.fps > 0):
            self.close()
            raise InvalidVideo(f"{name} does not say how many frames a second it has")

    def skip(self) -> bool:
        """Go past one frame; False at the end."""
        found = bool(self._capture.grab())
        self.seen += found
        return found

    def read(self, indices: np.ndarray) -> Iterator[np.ndarray]:
        """The frames (H, W, 3) at rising indices; fewer if the file ends before."""
        for index in indices.tolist():
            while self.seen <= index:
                if not self.skip():
                    return
            found, frame = self._capture.retrieve()
            if not found:
                return
            yield self._cv2.cvtColor(frame, self._cv2.COLOR_BGR2RGB)

    def close(self) -> None:
        self._capture.release()


@contextmanager
def _opened(path: Path, name: str) -> Iterator[_Capture]:
    capture = _Capture(path, name)
    try:
        yield capture
    finally:
        capture.close()


def _count(path: Path, name: str) -> int:
    """The frames of a file whose header does not say."""
    with _opened(path, name) as capture:
        while capture.skip():
            pass
        return capture.seen


@contextmanager
def _file_of(video: Video) -> Iterator[Path]:
    """The video as a file; what is none yet is one for as long as it is read. Raises InvalidVideo."""
    source, name = video.source, describe_video(video)
    if isinstance(source, (str, Path)) and not str(source).startswith(("data:", "http://", "https://")):
        path = Path(str(source).removeprefix("file://")).expanduser()
        if not path.is_file():
            raise InvalidVideo(f"{name} is not a file" if path.exists() else f"{name} does not exist")
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="vlm-batch-") as file:
        if not isinstance(source, (str, Path)):
            file.write(source)
        elif str(source).startswith("data:"):
            file.write(_from_data_uri(str(source)))
        else:
            _download(str(source), file)
        file.flush()
        yield Path(file.name)


def _from_data_uri(uri: str) -> bytes:
    head, _, data = uri.partition(",")
    if not data or not head.endswith(";base64"):
        raise InvalidVideo("the data URI is malformed: data:video/...;base64,... is expected")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise InvalidVideo(f"the data URI is not base64: {error}") from error


def _download(url: str, file: Any) -> None:
    try:
        with urllib.request.urlopen(url, timeout=URL_TIMEOUT_SECONDS) as response:
            shutil.copyfileobj(response, file)
    except (OSError, ValueError) as error:
        raise InvalidVideo(f"{url} cannot be fetched: {error}") from error
