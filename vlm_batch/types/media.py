"""Media of a request, and which of them may be read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from io import IOBase
from pathlib import Path
from typing import Any, TypeAlias

from vlm_batch.checks import as_tuple, demand, is_whole
from vlm_batch.errors import InvalidParameters
from vlm_batch.types.rules import (
    FieldRule,
    at_least,
    check_fields,
    is_bool,
    real_within,
    whole_within,
)

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
        check_fields(self, _OF_VIDEOS, InvalidParameters)
        if None not in (self.num_frames, self.max_frames):
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
        check_fields(self, _OF_RECORDINGS, InvalidParameters)


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
        check_fields(self, _OF_FETCHING, InvalidParameters)
        object.__setattr__(self, "directories", _paths(self.directories))


def _is_number_of_frames(value: Any) -> bool:
    takes_all = is_whole(value) and value == ALL_FRAMES
    return takes_all or _MOST.is_right(value)


#: The least number above 0.
_ABOVE_0 = math.ulp(0.0)
_FLAG = FieldRule(is_bool, "True or False")
_MOST = at_least(1, or_none=True)
_OF_VIDEOS = {
    "sound": _FLAG,
    "fps": FieldRule(real_within(_ABOVE_0), "a finite number above 0", or_none=True),
    "num_frames": FieldRule(_is_number_of_frames, _MOST.right, or_none=True),
    "max_frames": _MOST,
    "max_pixels": _MOST,
}
_OF_RECORDINGS = {
    "rate": FieldRule(
        whole_within(1_000, 768_000), "an integer in 1,000..768,000", or_none=True
    ),
}
_OF_FETCHING = {
    "allow_http": _FLAG,
    "allow_private": _FLAG,
    "allow_files": _FLAG,
    "max_bytes": at_least(1),
    "max_redirects": at_least(0),
    "seconds": FieldRule(
        real_within(_ABOVE_0, MAX_SECONDS), f"a number above 0, {MAX_SECONDS:,} at most"
    ),
}


def _paths(given: Any) -> tuple[str | Path, ...]:
    """Return one or several paths as a tuple."""
    is_one = isinstance(given, (str, Path, bytes))
    paths = (given,) if is_one else as_tuple("directories", given)
    is_right = all(map(_is_path, paths))
    demand(is_right, InvalidParameters, "directories", given, "a sequence of paths")
    return paths


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, Path)) and bool(str(value))


def several(given: Any) -> tuple[Any, ...]:
    """Return one or several media as a tuple; an iterator is read, a file is one."""
    if given is None:
        return ()
    is_file = isinstance(given, IOBase)  # an iterator, too
    if is_file or not isinstance(given, (list, tuple, Iterator)):
        return (given,)
    return tuple(given)
