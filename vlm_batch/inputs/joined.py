"""Files of which libsndfile reads a part, silent about the rest: joined ones, and an MP3 that does not say how long it is."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

from vlm_batch.errors import InvalidAudio
from vlm_batch.inputs.fetch import Cancelled

#: Most recordings of one file.
MAX_RECORDINGS = 10_000
#: Pages or frames between two looks at whether the request was cancelled.
_TURN = 1024
_ID3_HEAD, _ID3_TAIL, _APE_HEAD = 10, 128, 32
_MAX_TAGS = 100
_OGG_HEAD = 27
_OGG_FIRST, _OGG_LAST = 2, 4
#: A FLAC stream's mark with the block that must follow it, and a CAF file's.
_FLAC, _CAF = re.compile(rb"fLaC[\0\x80]\0\0\x22"), re.compile(rb"caff\0\x01\0\0desc")
#: First bytes of files with sound, each long enough that no other file has them by chance. An MP3 begins with its list of
#: contents, behind zeros in place of a frame's sound.
_SIGNATURES = {
    "wav": rb"(?:RIFF|RIFX|RF64).{4}WAVE(?:fmt |JUNK|bext|LIST|ds64)",
    "avi": rb"RIFF.{4}AVI LIST",
    "aiff": rb"FORM.{4}AIF[FC](?:COMM|FVER)",
    "caf": _CAF.pattern,
    "flac": _FLAC.pattern,
    "ogg": rb"OggS\0[\x02\x06]\0{8}",
    "mp3": rb"\xff[\xe2-\xff]..\0{9,32}(?:Xing|Info)\0\0\0",
    "mp4": rb"\0\0\0.ftyp(?:M4A|M4B|M4V|mp4|iso|qt  )",
    "mkv": rb"\x1a\x45\xdf\xa3.{1,40}(?:matroska|webm)",
}


def parts_of(data: bytes, name: str, cancelled: Cancelled) -> list[bytes]:
    """Return the recordings of a file, each as libsndfile reads it whole; a file of one is itself.

    Args:
        data: A file: wav, flac, mp3, ogg, aiff or caf.
        name: What messages call it.
        cancelled: Looked at while the file is walked through.

    Raises:
        InvalidAudio: An Ogg file ends before the last page of a stream, there are too many recordings, or a file of
            another kind follows.
        OperationCancelled: The request was cancelled.
    """
    starts = list(itertools.islice(_starts(data, name, cancelled), MAX_RECORDINGS + 1))
    if len(starts) > MAX_RECORDINGS:
        raise InvalidAudio(
            f"{name} is more than {MAX_RECORDINGS:,} recordings, joined to one file"
        )
    _check_nothing_else(data, starts or [0], name)
    if len(starts) < 2:
        return [_with_contents(data, starts[0] if starts else 0, cancelled)]
    ends = [*starts[1:], len(data)]
    return [
        _with_contents(data[start:end], 0, cancelled)
        for start, end in zip(starts, ends, strict=True)
    ]


def _starts(data: bytes, name: str, cancelled: Cancelled) -> Iterator[int]:
    begin = _behind_tags(data, 0)
    if data.startswith(b"OggS", begin):
        return _ogg_starts(data, begin, name, cancelled)
    if data.startswith((b"fLaC", b"caff"), begin):
        mark = _FLAC if data.startswith(b"fLaC", begin) else _CAF
        return itertools.chain(
            [0], (found.start() for found in mark.finditer(data, begin + 1))
        )
    if data.startswith((b"RIFF", b"RIFX", b"FORM")):
        return _chunk_starts(data, cancelled)
    return _mpeg_starts(data, begin, cancelled)


def _check_nothing_else(data: bytes, starts: list[int], name: str) -> None:
    """Raise InvalidAudio if a file of another kind stands behind these recordings."""
    first = _behind_tags(data, starts[0])
    own = next(
        (kind for kind, mark in _signatures().items() if mark.match(data, first)), "mp3"
    )
    # where the others end is known only to their decoders
    begin = first if own in ("flac", "mp3", "caf") else _end_of(data, starts[-1], own)
    for kind, mark in _signatures().items():
        if kind != own and mark.search(data, begin):
            raise InvalidAudio(
                f"{name} is a recording of {own} with a file of {kind} joined to it; split it first"
            )


@cache
def _signatures() -> dict[str, re.Pattern[bytes]]:
    return {kind: re.compile(first, re.DOTALL) for kind, first in _SIGNATURES.items()}


def _end_of(data: bytes, at: int, kind: str) -> int:
    """Return where a recording of a kind that says it ends."""
    if kind == "ogg":
        return data.rfind(b"OggS") + _OGG_HEAD
    is_little = data.startswith((b"RIFF", b"RF64"), at)
    size = int.from_bytes(data[at + 4 : at + 8], "little" if is_little else "big")
    return at + 8 + size


def _chunk_starts(data: bytes, cancelled: Cancelled) -> Iterator[int]:
    """Yield the beginnings of chunks of the first one's kind, one behind another."""
    at, kind = 0, data[:4]
    while data.startswith(kind, at) and len(data) >= at + 12:
        cancelled.check()
        yield at
        size = int.from_bytes(
            data[at + 4 : at + 8], "little" if kind == b"RIFF" else "big"
        )
        at += 8 + size + size % 2


def _behind_tags(data: bytes, at: int) -> int:
    """Return where ID3 and APE tags at ``at`` end."""
    for _ in range(_MAX_TAGS):
        if data.startswith(b"ID3", at) and len(data) >= at + _ID3_HEAD:
            size = 0
            for byte in data[at + 6 : at + _ID3_HEAD]:
                size = size << 7 | byte & 0x7F
            at += _ID3_HEAD + size
        elif data.startswith(b"TAG", at):
            at += _ID3_TAIL
        elif data.startswith(b"APETAGEX", at) and len(data) >= at + _APE_HEAD:
            at += _APE_HEAD + int.from_bytes(data[at + 12 : at + 16], "little")
        else:
            break
    return at


# Ogg
# ---------------------------------------------------------------------------------------------------------------------


def _ogg_starts(data: bytes, at: int, name: str, cancelled: Cancelled) -> Iterator[int]:
    """Yield the first page of each link of a chain, whose streams' first pages stand together."""
    alive, begun = set[bytes](), set[bytes]()
    begins = True  # a link, whose first pages these are
    number = 0
    while (at := data.find(b"OggS", at)) >= 0 and len(data) >= at + _OGG_HEAD:
        number += 1
        if number % _TURN == 0:
            cancelled.check()
        kind, serial, segments = data[at + 5], data[at + 14 : at + 18], data[at + 26]
        if kind & _OGG_FIRST:
            if not begins or number == 1:
                _check_ended(alive, name)
                yield at
            begins = True
            alive.add(serial)
            begun.add(serial)
        elif serial not in begun:
            # whose first page is in the middle of one that was cut
            raise InvalidAudio(
                f"{name} is damaged: a page of it belongs to no stream that began"
            )
        else:
            begins = False
        at += (
            _OGG_HEAD + segments + sum(data[at + _OGG_HEAD : at + _OGG_HEAD + segments])
        )
        if kind & _OGG_LAST and at <= len(data):
            alive.discard(serial)
    _check_ended(alive, name)


def _check_ended(alive: set[bytes], name: str) -> None:
    if alive:
        raise InvalidAudio(
            f"{name} is damaged: it ends before the last page of its stream"
        )


# MPEG
# ---------------------------------------------------------------------------------------------------------------------

#: Kilobits a second by version 1 and layer 1 to 3, then by version 2 and layers 1, and 2 or 3 (ISO/IEC 11172-3 and 13818-3).
_RATES_OF_BITS = {
    (1, 1): range(32, 449, 32),
    (1, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
#: The first three bytes of a frame's header whose numbers have a meaning.
_HEADER = re.compile(rb"\xff[\xe2-\xe7\xf2-\xff][\x10-\xeb]", re.DOTALL)
#: Frames that a header may leave out before what follows counts as another recording.
_FEW = 4
#: Most places that are looked at for the next frame behind something else.
_MAX_TRIES = 100_000


@dataclass(frozen=True)
class _Frame:
    """A frame's bytes, what all frames of its recording have in common, and where its list of contents would be."""

    size: int
    kind: tuple[int, int, int, bool]
    contents: int


@lru_cache(maxsize=4096)
def _frame(header: bytes) -> _Frame | None:
    """Read the four bytes of a frame's header; None if they are none."""
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE0 != 0xE0:
        return None
    version = {0: 25, 2: 20, 3: 10}.get(header[1] >> 3 & 3)  # in tenths
    layer = 4 - (header[1] >> 1 & 3)
    bits, rate, padding = header[2] >> 4, header[2] >> 2 & 3, header[2] >> 1 & 1
    if version is None or layer == 4 or bits in (0, 15) or rate == 3:
        return None
    is_first = version == 10
    hertz = (44_100, 48_000, 32_000)[rate] // {10: 1, 20: 2, 25: 4}[version]
    table = _RATES_OF_BITS[(1, layer) if is_first else (2, min(layer, 2))]
    per_second = table[bits - 1] * 1000
    if layer == 1:
        size = (12 * per_second // hertz + padding) * 4
    else:
        size = (144 if is_first or layer == 2 else 72) * per_second // hertz + padding
    is_mono = header[3] >> 6 == 3
    side = (17 if is_mono else 32) if is_first else (9 if is_mono else 17)
    return _Frame(size, (version, layer, hertz, is_mono), 4 + side)


def _announced(data: bytes, at: int, frame: _Frame) -> int | None:
    """Return the frames that a recording's first one lists (0 if it does not say); None if it is no such frame."""
    mark = at + frame.contents
    if data.startswith((b"Xing", b"Info"), mark):
        says = data[mark + 7 : mark + 8] >= b"\1" and data[mark + 7] & 1
        return int.from_bytes(data[mark + 8 : mark + 12], "big") if says else 0
    if data.startswith(b"VBRI", at + 36):
        return int.from_bytes(data[at + 50 : at + 54], "big")
    return None


def _mpeg_starts(data: bytes, at: int, cancelled: Cancelled) -> Iterator[int]:
    """Yield where recordings begin: at a list of contents, behind as many frames as one lists, at another rate."""
    kind: tuple[int, int, int, bool] | None = None
    left: int | None = None  # frames that the list of contents still has
    over: list[int] = []  # frames behind those
    for place, frame in _frames(data, at, cancelled):
        listed = _announced(data, place, frame)
        if listed is not None or frame.kind != kind:
            yield place
            kind, left, over = frame.kind, listed or None, []
        elif left is not None and left > 0:
            left -= 1
        elif left is not None:
            over.append(place)
            if len(over) > _FEW:
                yield over[0]
                left, over = None, []


def _with_contents(data: bytes, at: int, cancelled: Cancelled) -> bytes:
    """Put a list of contents before an MP3 that has none: libsndfile guesses its length from the first frame alone."""
    first = _frame(data[at : at + 4])
    if first is None or first.kind[1] != 3 or _announced(data, at, first) is not None:
        return data
    count = sum(1 for _ in _frames(data, at, cancelled))
    # a frame of the same kind, without a checksum and at a rate at which it has room; its sound is all zeros
    head = bytes([0xFF, data[at + 1] | 1, data[at + 2] & 0x0C | 0x90, data[at + 3]])
    made = _frame(head)
    if made is None:
        return data
    size = made.size + len(data) - at
    listed = b"Xing\0\0\0\x03" + count.to_bytes(4, "big") + size.to_bytes(4, "big")
    frame = head + bytes(made.contents - len(head)) + listed
    return frame + bytes(made.size - len(frame)) + data[at:]


def _frames(data: bytes, at: int, cancelled: Cancelled) -> Iterator[tuple[int, _Frame]]:
    turns, tries, kind = 0, 0, None
    while at < len(data):
        turns += 1
        if turns % _TURN == 0:
            cancelled.check()
        frame = _frame(data[at : at + 4])
        if frame is not None and (
            frame.kind == kind or _follows(data, at + frame.size, frame)
        ):
            yield at, frame
            kind = frame.kind
            at += frame.size
            continue
        behind = _behind_tags(data, at)
        if behind == at:
            found = _HEADER.search(data, at + 1)
            behind = (
                len(data) if found is None or tries == _MAX_TRIES else found.start()
            )
            tries += 1
        at = behind


def _follows(data: bytes, at: int, frame: _Frame) -> bool:
    """Whether another frame of a recording, tags or the file's end are at ``at``."""
    after = _frame(data[at : at + 4])
    if after is not None:
        return after.kind == frame.kind
    return at == len(data) or (at < len(data) and _behind_tags(data, at) > at)
