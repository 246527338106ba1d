"""Read videos as RGB frames. Every failure is an InvalidVideo."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlm_batch.errors import InvalidImage, InvalidVideo
from vlm_batch.inputs.captures import AvCapture
from vlm_batch.inputs.fetch import (
    NEVER,
    USUAL,
    Cancelled,
    Fetched,
    fetch_to_file,
    file_of_bytes,
    name_medium,
)
from vlm_batch.inputs.images import (
    DEFAULT_MAX_PIXELS,
    check_size,
    count_pixels,
    fetch_image,
    load_image,
)
from vlm_batch.inputs.refusals import exceeds, refused_as, unread_as
from vlm_batch.inputs.tracks import container_of, count_movies
from vlm_batch.types import ALL_FRAMES, FetchPolicy, ImageInput, Video, VideoInput

#: Most pixels of one video's frames together: 1.5 GB of RGB, or four minutes of 1080p at 1 frame a second.
DEFAULT_MAX_VIDEO_PIXELS = 500_000_000
#: Share of the announced frames that may be missing (and two more): headers count by duration. More is damage.
MAX_MISSING_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """A family's choice of frames: ``fps`` a second within bounds, or ``num_frames``.

    Their number is a multiple of ``frame_factor``, the frames merged by the model. Without ``to_the_end``, each is the
    first of an equal part.
    """

    fps: float = 2.0
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    frame_factor: int = 2
    to_the_end: bool = True

    def indices(self, total: int, fps: float, video: Video) -> np.ndarray:
        """Choose frames: indices (N,)."""
        most = total
        if video.num_frames is not None:
            wanted = float(
                total if video.num_frames == ALL_FRAMES else video.num_frames
            )
        else:
            wanted = self._wanted(total / fps, video.fps)
            most = min(video.max_frames or self.max_frames, total)
        number = math.floor(min(wanted, most) / self.frame_factor) * self.frame_factor
        number = number or min(self.frame_factor, most)
        if self.to_the_end:
            return spread(total, number)
        return np.arange(number) * total // number

    def _wanted(self, seconds: float, fps: float | None) -> float:
        if self.num_frames is not None and fps is None:
            return self.num_frames
        return max(seconds * (fps or self.fps), self.min_frames)


#: Of a family that says nothing.
SAMPLING = Sampling()


@dataclass(frozen=True)
class Clip:
    """Decoded uint8 frames (T, H, W, 3), and their place in the source."""

    frames: np.ndarray
    indices: tuple[int, ...]
    total: int
    fps: float
    asked: float | None = None  # frames a second, where they were asked for so

    @property
    def size(self) -> tuple[int, int, int]:
        """(frames, width, height)."""
        count, height, width, _ = self.frames.shape
        return count, width, height

    @property
    def sampled_fps(self) -> float:
        """Frames a second of the clip itself."""
        return len(self.indices) / self.total * self.fps

    @property
    def rate(self) -> float:
        """Requested frames a second, else the clip's."""
        if self.asked is None:
            return self.sampled_fps
        return self.asked


def spread(total: int, number: int) -> np.ndarray:
    """Return ``number`` even indices, from the first of ``total`` to the last."""
    return np.linspace(0, total - 1, number).round().astype(int)


def as_video(source: VideoInput) -> Video:
    """Return a video from itself or its source. Raises InvalidVideo for what is none."""
    video = source if isinstance(source, Video) else Video(source)
    source = video.source
    if isinstance(source, (str, Path, bytes, bytearray, memoryview, Fetched)):
        return video
    name = describe_video(video)
    if video.sound:
        raise InvalidVideo(f"{name} has no sound; give its recording as audios=")
    if not isinstance(source, Sequence):
        _check_is_array(video)
    elif not source:
        raise InvalidVideo("the video has no frames")
    return video


def _check_is_array(video: Video) -> None:
    is_picture = isinstance(video.source, Image.Image)
    if is_picture or _of_foreign(np.ndim, video) != 4:
        raise InvalidVideo(
            f"{describe_video(video)} is no video: a file, an array (T, H, W, 3), or frames together as "
            "Video([first, second, ...], fps=2)"
        )


def load_video(
    video: VideoInput,
    sampling: Sampling = SAMPLING,
    max_pixels: int | None = DEFAULT_MAX_VIDEO_PIXELS,
    max_image_pixels: int | None = DEFAULT_MAX_PIXELS,
    policy: FetchPolicy = USUAL,
    cancelled: Cancelled = NEVER,
) -> Clip:
    """Read upright RGB frames; the video's own sampling overrides ``sampling``.

    ``max_pixels`` bounds all frames together. Raises InvalidVideo or OperationCancelled.
    """
    video = fetch_video(as_video(video), policy, cancelled)
    source = video.source
    if isinstance(source, Fetched):
        assert source.path is not None
        limits = max_pixels, max_image_pixels
        video = replace(video, source=source)
        return _decode(source.path, video, sampling, limits, cancelled)
    total = len(source)
    indices = _thinned(total, video)
    pictures = _pictures(video, indices, max_image_pixels, cancelled)
    fps = video.fps or sampling.fps
    clip = _clip(pictures, video, indices, total, fps, max_pixels)
    is_whole = len(clip.indices) == clip.total
    return replace(clip, asked=clip.fps if is_whole else None)


def own_video(video: Video, own: Callable[[ImageInput], ImageInput]) -> Video:
    """Copy what the caller could still change."""
    source = video.source
    if isinstance(source, (str, Path, bytes, Fetched)):
        return video
    if isinstance(source, (bytearray, memoryview)):
        return replace(video, source=bytes(source))
    # an array may be a file that is mapped, of which a few frames are wanted
    as_frames = list if isinstance(source, Sequence) else np.asarray
    frames = _of_foreign(as_frames, video)
    wanted = _thinned(len(frames), video).tolist()
    return _with_frames(replace(video, source=frames), own, wanted)


def _of_foreign(call: Callable[[Any], Any], video: Video) -> Any:
    """Call a function on a source; exceptions become InvalidVideo."""
    with refused_as(InvalidVideo, f"{describe_video(video)} cannot be read"):
        return call(video.source)


def _with_frames(
    video: Video, change: Callable[[ImageInput], ImageInput], wanted: Sequence[int]
) -> Video:
    """Apply ``change`` to the ``wanted`` frames; nobody reads the others."""
    frames = _of_foreign(list, video)
    for at in wanted:
        with _naming_the_frame(video, at):
            frames[at] = change(frames[at])
    return replace(video, source=frames)


def sources_to_read(video: Video) -> list[Any]:
    """Return what of a video waits for a disk or network: its file, or its frames' files."""
    source = video.source
    if isinstance(source, (str, Path, bytes)):
        return [source]
    frames = source if isinstance(source, Sequence) else ()
    return [frame for frame in frames if isinstance(frame, (str, Path))]


def fetch_video(video: Video, policy: FetchPolicy, cancelled: Cancelled) -> Video:
    """Fetch the video's file, or its frames' files."""
    source = video.source
    if isinstance(source, (str, Path)):
        with unread_as(InvalidVideo):
            return replace(video, source=fetch_to_file(source, policy, cancelled))
    if isinstance(source, (bytes, bytearray, memoryview)):
        file = file_of_bytes(bytes(source), describe_video(video))
        return replace(video, source=file)
    if not sources_to_read(video):
        return video
    wanted = _thinned(len(source), video).tolist()
    return _with_frames(
        video, lambda frame: fetch_image(frame, policy, cancelled), wanted
    )


def measure_video(video: Video, sampling: Sampling) -> tuple[int, int]:
    """Return the number of frames to take and their pixels together, by the header; zeros where it does not say."""
    source = video.source
    if isinstance(source, (str, Path, bytes)):
        return 0, 0
    try:
        if isinstance(source, Fetched) and source.path is not None:
            return _measure_file(source.path, source.name, video, sampling)
        indices = _thinned(len(source), video).tolist()
        return len(indices), len(indices) * count_pixels(source[indices[0]])
    except Exception:  # whoever decodes it will say what is wrong
        return 0, 0


def _measure_file(
    path: Path, name: str, video: Video, sampling: Sampling
) -> tuple[int, int]:
    with _opened(path, name) as capture:
        if capture.announced <= 0:
            return 0, 0
        count = len(sampling.indices(capture.announced, capture.fps, video))
        frame_pixels = math.prod(_scaled(*capture.size, video.max_pixels))
        return count, count * frame_pixels


def describe_video(video: Video) -> str:
    return name_medium(video.source, "video")


# Frames that are given one by one
# ---------------------------------------------------------------------------------------------------------------------


def _thinned(total: int, video: Video) -> np.ndarray:
    if video.num_frames == ALL_FRAMES:
        return spread(total, total)
    return spread(total, min(total, video.num_frames or video.max_frames or total))


def _pictures(
    video: Video, indices: np.ndarray, max_pixels: int | None, cancelled: Cancelled
) -> Iterator[np.ndarray]:
    for index in indices.tolist():
        cancelled.check()
        with _naming_the_frame(video, index):
            picture = load_image(video.source[index], max_pixels)
        yield np.asarray(picture)


@contextmanager
def _naming_the_frame(video: Video, at: int) -> Iterator[None]:
    try:
        yield
    except InvalidImage as error:
        raise InvalidVideo(f"frame {at} of {describe_video(video)}: {error}") from error


def _clip(
    pictures: Iterator[np.ndarray],
    video: Video,
    indices: np.ndarray,
    total: int,
    fps: float,
    max_pixels: int | None,
) -> Clip:
    first = next(pictures, None)
    if first is None:
        raise InvalidVideo(f"{describe_video(video)} has no frame that can be decoded")
    width, height = _scaled(first.shape[1], first.shape[0], video.max_pixels)
    _check_pixels(video, len(indices), width, height, max_pixels)
    frames = np.empty((len(indices), height, width, 3), np.uint8)
    count = 0
    for picture in itertools.chain((first,), pictures):
        if picture.shape != first.shape:
            raise InvalidVideo(
                f"{describe_video(video)} has frames of {first.shape[1]} x {first.shape[0]} and of "
                f"{picture.shape[1]} x {picture.shape[0]} pixels; all must be of one size"
            )
        frames[count] = _resized(picture, width, height)
        count += 1
    return Clip(frames[:count], tuple(indices[:count].tolist()), total, fps)


def _scaled(width: int, height: int, max_pixels: int | None) -> tuple[int, int]:
    if max_pixels is None or width * height <= max_pixels:
        return width, height
    scale = math.sqrt(max_pixels / (width * height))
    return max(1, math.floor(width * scale)), max(1, math.floor(height * scale))


def _resized(picture: np.ndarray, width: int, height: int) -> np.ndarray:
    if picture.shape[:2] == (height, width):
        return picture
    return np.asarray(
        Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC)
    )


def _check_pixels(
    video: Video, count: int, width: int, height: int, max_pixels: int | None
) -> None:
    if exceeds(count * width * height, max_pixels):
        raise InvalidVideo(
            f"{describe_video(video)}: {count} frames of {width} x {height} are {count * width * height:,} pixels; at most "
            f"{max_pixels:,} are read. Its fps, max_frames or max_pixels can make it less",
            advice=" (Limits.video_pixels; Video(..., max_frames=))",
        )


# Files
# ---------------------------------------------------------------------------------------------------------------------


def _decode(
    path: Path,
    video: Video,
    sampling: Sampling,
    limits: tuple[int | None, int | None],
    cancelled: Cancelled,
) -> Clip:
    """Decode in one pass: seeking is not always exact."""
    name, (max_pixels, max_frame_pixels) = describe_video(video), limits
    _check_file(path, name)
    with _opened(path, name) as capture:
        total, fps = capture.announced, capture.fps
        check_size(f"a frame of {name}", *capture.size, max_frame_pixels, InvalidVideo)
    _check_one_movie(path, name, cancelled)
    if total <= 0:
        total = _count(path, name, cancelled)
    for _ in range(2):  # a second time by the number of frames that the first saw
        if total == 0:
            break
        indices = sampling.indices(total, fps, video)
        with _opened(path, name) as capture:
            size = _scaled(*capture.size, video.max_pixels)
            _check_pixels(video, len(indices), *size, max_pixels)
            frames = capture.read(indices, cancelled)
            clip = _clip(frames, video, indices, total, fps, max_pixels)
            # to the end, for its header may speak of the first of several files that were joined
            while capture.skip():
                cancelled.check()
        allowed = max(2, MAX_MISSING_SHARE * total)
        is_longer = capture.seen - total > allowed
        if len(clip.indices) == len(indices) and not is_longer:
            return replace(clip, asked=_rate_of(video, sampling))
        if total - capture.seen > allowed:
            raise InvalidVideo(
                f"{name} is damaged: its header says {total} frames, and it ends after {capture.seen}"
            )
        total = capture.seen
    raise InvalidVideo(f"{name} has no frame that can be decoded")


def _check_file(path: Path, name: str) -> None:
    if path.is_file() and not path.stat().st_size:
        raise InvalidVideo(f"{name} is empty (0 bytes)")
    if _is_text(path):
        raise InvalidVideo(
            f"{name} is not a video that FFmpeg can read: it is text (playlists are not followed)"
        )


def _check_one_movie(path: Path, name: str, cancelled: Cancelled) -> None:
    if container_of(path) != "mov":
        return
    with open(path, "rb") as file:
        if count_movies(file, cancelled) > 1:
            raise InvalidVideo(
                f"{name} is several files joined, of which FFmpeg reads the first; convert it first"
            )


def _rate_of(video: Video, sampling: Sampling) -> float | None:
    """Return the frames a second that were asked for; None where their number was."""
    if video.num_frames is not None:
        return None
    if video.fps is not None:
        return video.fps
    return sampling.fps if sampling.num_frames is None else None


def _is_text(path: Path) -> bool:
    """Whether a file looks like a playlist, by which FFmpeg opens other files."""
    try:
        with open(path, "rb") as file:
            head = file.read(64).removeprefix(b"\xef\xbb\xbf")
    except OSError:
        return False  # what is wrong with it is said when it is opened
    return _TEXT.fullmatch(head) is not None


#: What a playlist is made of.
_TEXT = re.compile(rb"[\x20-\x7e\t\r\n]+")


class _Capture:
    def __init__(self, path: Path, name: str) -> None:
        import cv2  # here: only videos need it

        self._cv2, self.seen = cv2, 0
        self._capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
        if not self._capture.isOpened():
            raise InvalidVideo(f"{name} is not a video that FFmpeg can read")
        said = self._capture.get
        self.announced = int(said(cv2.CAP_PROP_FRAME_COUNT))
        self.fps = float(said(cv2.CAP_PROP_FPS))
        codec = int(said(cv2.CAP_PROP_FOURCC)).to_bytes(4, "little")
        self.is_av1 = codec.upper() == b"AV01"
        #: (width, height) as the header says; the frames decide.
        self.size = (
            int(said(cv2.CAP_PROP_FRAME_WIDTH)),
            int(said(cv2.CAP_PROP_FRAME_HEIGHT)),
        )
        if not math.isfinite(self.fps) or self.fps <= 0:
            self.close()
            raise InvalidVideo(f"{name} does not say how many frames a second it has")

    def skip(self) -> bool:
        """Skip one frame; return False at the end."""
        found = bool(self._capture.grab())
        self.seen += found
        return found

    def read(self, indices: np.ndarray, cancelled: Cancelled) -> Iterator[np.ndarray]:
        """Yield frames (H, W, 3) at rising indices, until the file ends."""
        for index in indices.tolist():
            while self.seen <= index:
                cancelled.check()
                if not self.skip():
                    return
            found, frame = self._capture.retrieve()
            if not found:
                return
            yield self._cv2.cvtColor(frame, self._cv2.COLOR_BGR2RGB)

    def close(self) -> None:
        self._capture.release()


@contextmanager
def _opened(path: Path, name: str) -> Iterator[_Capture | AvCapture]:
    with closing(_Capture(path, name)) as capture:
        if not capture.is_av1:
            yield capture
            return
    known = capture.announced, capture.fps, capture.size
    with closing(AvCapture(path, name, *known)) as av1:
        yield av1


def _count(path: Path, name: str, cancelled: Cancelled) -> int:
    with _opened(path, name) as capture:
        while capture.skip():
            cancelled.check()
        return capture.seen
