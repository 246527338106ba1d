"""Sound tracks of mp4, mov, mkv, webm and avi files, and raw AAC, decoded by PyAV."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import SEEK_END, BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vlm_batch.errors import InvalidAudio
from vlm_batch.inputs.fetch import Cancelled
from vlm_batch.inputs.refusals import refused_as

#: FFmpeg's names of containers, and their first bytes: an MP4 or QuickTime file's first box (ISO/IEC 14496-12), EBML's mark
#: (mkv and webm), ADTS, whose layer is 0, and an avi's.
_BEGINNINGS = {
    "mov": re.compile(rb".{4}(?:ftyp|moov|mdat|wide|free|skip)", re.DOTALL),
    "matroska": re.compile(rb"\x1aE\xdf\xa3"),
    "aac": re.compile(rb"\xff[\xf0\xf1\xf8\xf9]"),
    "avi": re.compile(rb"RIFF.{4}AVI ", re.DOTALL),
}
#: Bytes that tell the containers apart.
_HEAD = 12
#: Share of what is announced that may be missing at the end before the file counts as damaged.
MAX_MISSING_SHARE = 0.05
#: From here on a RIFF's number of bytes means that its writer did not know it.
UNKNOWN_BYTES = 0x7FFF_0000


def container_of(source: bytes | Path) -> str | None:
    """Return FFmpeg's name of a file's container, by its first bytes."""
    with _opened(source) as file:
        head = file.read(_HEAD)
    for name, begin in _BEGINNINGS.items():
        if begin.match(head):
            return name
    return None


@contextmanager
def opened_track(
    source: bytes | Path,
    container: str,
    name: str,
    check: Callable[[str, int, int, int], None],
    cancelled: Cancelled,
) -> Iterator[tuple[int, int, Iterator[np.ndarray]]]:
    """Yield rate, announced samples (0 if unknown), and blocks (n, channels) of a file's first sound track.

    ``check`` takes name, samples, rate and channels before decoding.
    """
    try:
        import av
    except ImportError as error:
        raise InvalidAudio(
            f"{name} is a video, an mp4 or an aac file, and PyAV, which decodes the sound in those, is not installed",
            advice=': pip install "vlm-batch[sound]"',
        ) from error
    with _opened(source) as file:
        if container == "avi":
            _check_size(file, name)
        if container == "mov" and count_movies(file, cancelled) > 1:
            raise InvalidAudio(
                f"{name} is several files joined, of which FFmpeg reads the first; convert it first"
            )
        with refused_as(InvalidAudio, f"{name} cannot be opened"):
            # a container that is named, behind a file of ours: FFmpeg follows no playlist and opens nothing else
            opened = av.open(file, format=container, metadata_errors="ignore")
        with opened:
            if not opened.streams.audio:
                raise InvalidAudio(f"{name} has no sound")
            stream = opened.streams.audio[0]
            # an avi's counts the silence before it; raw AAC says nothing, and FFmpeg guesses
            is_said = container not in ("avi", "aac")
            own = float((stream.duration or 0) * stream.time_base) if is_said else 0.0
            seconds = 0.0 if own or container == "aac" else (opened.duration or 0) / 1e6
            frames = _frames(opened, stream, seconds, name, cancelled)
            first = next(frames, None)
            if first is None:
                raise InvalidAudio(f"{name} has no samples")
            # of a frame, for headers of AAC may say half the rate
            rate, channels = int(first.sample_rate), len(first.layout.channels)
            announced = round(own * rate)
            check(name, announced, rate, channels)
            yield rate, announced, _samples(first, frames, name)


def _opened(source: bytes | Path) -> BinaryIO:
    return BytesIO(source) if isinstance(source, bytes) else source.open("rb")


def count_movies(file: BinaryIO, cancelled: Cancelled) -> int:
    """Count the boxes of an MP4 or QuickTime file that say what it holds: two where two files were joined."""
    at, count = 0, 0
    while len(head := file.read(16)) >= 8:
        cancelled.check()
        size = int.from_bytes(head[:4], "big")
        if size == 1:  # it follows the name, in eight bytes
            size = int.from_bytes(head[8:], "big")
        count += head[4:8] == b"moov"
        if size < 8:  # the last box, or damage
            break
        at += size
        file.seek(at)
    file.seek(0)
    return count


def _check_size(file: BinaryIO, name: str) -> None:
    """Refuse a cut avi, whose duration FFmpeg guesses from what is left."""
    said = int.from_bytes(file.read(_HEAD)[4:8], "little") + 8
    held = file.seek(0, SEEK_END)
    file.seek(0)
    if said < UNKNOWN_BYTES and said - held > MAX_MISSING_SHARE * said:
        raise InvalidAudio(
            f"{name} is damaged: its header says {said:,} bytes, and it has {held:,}"
        )


def _frames(
    opened: Any, stream: Any, seconds: float, name: str, cancelled: Cancelled
) -> Iterator[Any]:
    """Decode a stream of a container of ``seconds``, which the last packet of any stream must reach."""
    packets, end = opened.demux(), 0.0
    decoding = partial(refused_as, InvalidAudio, f"{name} cannot be decoded")
    while True:
        cancelled.check()
        with decoding():
            packet = next(packets, None)
        if packet is None:
            break
        if packet.pts is not None:
            ticks = packet.pts + (packet.duration or 0)
            end = max(end, float(ticks * packet.time_base))
        if packet.stream is stream:
            with decoding():
                frames = stream.decode(packet)
            yield from frames
    if seconds - end > MAX_MISSING_SHARE * seconds:
        raise InvalidAudio(
            f"{name} is damaged: its header says {seconds:,.1f} s, and it ends after {end:,.1f}"
        )


def _samples(first: Any, rest: Iterator[Any], name: str) -> Iterator[np.ndarray]:
    form = first.sample_rate, len(first.layout.channels)
    for frame in chain((first,), rest):
        if (frame.sample_rate, len(frame.layout.channels)) != form:
            raise InvalidAudio(
                f"{name} changes its sample rate or its channels on the way; convert it first"
            )
        # (channels, n), or (1, n * channels) where they alternate
        values = frame.to_ndarray()
        yield values.T if frame.format.is_planar else values.reshape(-1, form[1])
