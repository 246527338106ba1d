"""Media of a request, and which of them may be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from io import IOBase
from pathlib import Path
from typing import Any, TypeAlias

from vlm_batch.checks import as_tuple, demand, is_real, is_whole
from vlm_batch.errors import InvalidParameters

#: A path, URL, data URI, ``bytes``, open file, PIL image, or array (H, W), (H, W, 3) or (H, W, 4) of uint8 or floats in 0..1.
ImageInput: TypeAlias = Any

#: A ``Video``, or what its ``source`` can be.
VideoInput: TypeAlias = Any

#: An ``Audio``, or what its ``source`` can be but for an array.
AudioInput: TypeAlias = Any

#: ``Video.num_frames`` that takes all of them.
ALL_FRAMES = -1
#: Most seconds for reading a source: a day. Clocks and locks take no much larger number.
MAX_SECONDS = 86_400


@dataclass(frozen=True)
class Video:
    """A video and the choice of its frames.

    Args:
        source: a file (path, URL, data URI, bytes), pictures of one size, or an array (T, H, W, 3) of uint8.
        fps: frames a second to sample from a file; the rate of given frames, which are all used. None: the family's
            setting.
        num_frames: frames to take evenly, instead of ``fps``; -1 takes all. Excludes ``max_frames``.
        max_frames: most frames, taken evenly if there are more.
        max_pixels: most pixels of a frame; larger ones are scaled down.
        sound: hear the file's sound, as a recording behind the video.

    Raises:
        InvalidParameters: a value is out of range.
    """

    source: Any
    _: KW_ONLY
    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None
    sound: bool = False

    def __post_init__(self) -> None:
        _check_flag("sound", self.sound)
        if self.fps is not None:
            is_right = is_real(self.fps) and self.fps > 0
            right = "a finite number above 0"
            demand(is_right, InvalidParameters, "fps", self.fps, right)
        takes_all = is_whole(self.num_frames) and self.num_frames == ALL_FRAMES
        if not takes_all:
            _check_most("num_frames", self.num_frames)
        _check_most("max_frames", self.max_frames)
        _check_most("max_pixels", self.max_pixels)
        if self.num_frames is not None and self.max_frames is not None:
            raise InvalidParameters("num_frames and max_frames exclude each other")


@dataclass(frozen=True)
class Audio:
    """A recording.

    Args:
        source: a wav, flac, mp3, ogg, aiff, caf or aac file (path, URL, data URI, bytes), an mp4, mov, mkv, webm or avi
            file with sound, or an array (samples,) or (samples, channels) of floats in -1..1, int16, int32 or uint8.
        rate: samples a second, for an array only, which needs it.

    Raises:
        InvalidParameters: the rate is out of range.
    """

    source: Any
    _: KW_ONLY
    rate: int | None = None

    def __post_init__(self) -> None:
        rate = self.rate
        if rate is None:
            return
        is_right = is_whole(rate) and 1_000 <= rate <= 768_000
        right = "an integer in 1,000..768,000"
        demand(is_right, InvalidParameters, "rate", rate, right)


@dataclass(frozen=True, kw_only=True)
class FetchPolicy:
    """Rules for reading media by path or URL.

    Addresses are checked as they resolve here; a proxy from the environment resolves names itself.

    Args:
        allow_http: read http and https URLs.
        allow_private: also from loopback, private, link-local and other non-public addresses.
        allow_files: read local paths.
        directories: if any, only paths below these, with links resolved.
        max_bytes: most bytes of a URL, a data URI, or a file of a picture or recording.
        seconds: most seconds for one source.
        max_redirects: most redirects of a URL.

    Raises:
        InvalidParameters: a value is out of range.
    """

    allow_http: bool = True
    allow_private: bool = False
    allow_files: bool = True
    directories: Sequence[str | Path] = ()
    max_bytes: int = 256 << 20
    seconds: float = 60.0
    max_redirects: int = 5

    def __post_init__(self) -> None:
        _check_flag("allow_http", self.allow_http)
        _check_flag("allow_private", self.allow_private)
        _check_flag("allow_files", self.allow_files)
        _check_least("max_bytes", self.max_bytes, 1)
        _check_least("max_redirects", self.max_redirects, 0)
        seconds = self.seconds
        is_right = is_real(seconds) and 0 < seconds <= MAX_SECONDS
        right = f"a number above 0, {MAX_SECONDS:,} at most"
        demand(is_right, InvalidParameters, "seconds", seconds, right)
        object.__setattr__(self, "directories", _paths(self.directories))


def _check_flag(name: str, value: Any) -> None:
    is_right = isinstance(value, bool)
    demand(is_right, InvalidParameters, name, value, "True or False")


def _check_least(name: str, value: Any, least: int) -> None:
    is_right = is_whole(value) and value >= least
    demand(is_right, InvalidParameters, name, value, f"an integer of at least {least}")


def _check_most(name: str, value: Any) -> None:
    """Check a bound on how many there may be, which may be None."""
    if value is not None:
        _check_least(name, value, 1)


def _paths(given: Any) -> tuple[str | Path, ...]:
    """Return one or several paths as a tuple."""
    if isinstance(given, (str, Path)):
        paths: tuple[Any, ...] = (given,)
    else:
        paths = as_tuple("directories", given)
    is_right = all(isinstance(one, (str, Path)) and str(one) for one in paths)
    if isinstance(given, bytes):  # of which an empty one has no part that is wrong
        is_right = False
    demand(is_right, InvalidParameters, "directories", given, "a sequence of paths")
    return paths


def several(given: Any) -> tuple[Any, ...]:
    """Return one or several media as a tuple; an iterator is read, a file is one."""
    if given is None:
        return ()
    if isinstance(given, (list, tuple)):
        return tuple(given)
    is_file = isinstance(given, IOBase)
    if isinstance(given, Iterator) and not is_file:
        return tuple(given)
    return (given,)
