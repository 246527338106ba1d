"""Files of which libsndfile reads a part, silent about the rest: joined ones, and an MP3 that does not say how long it is."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, NamedTuple

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
#: Kinds whose decoders alone know where a recording ends.
_OPEN_ENDED = ("flac", "mp3", "caf")
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
    starts = starts or [0]
    _check_nothing_else(data, starts, name)
    if len(starts) == 1:
        return [_with_contents(data, starts[0], cancelled)]
    pieces = map(data.__getitem__, map(slice, starts, [*starts[1:], len(data)]))
    return [_with_contents(piece, 0, cancelled) for piece in pieces]


def _starts(data: bytes, name: str, cancelled: Cancelled) -> Iterator[int]:
    begin = _behind_tags(data, 0)
    if data.startswith(b"OggS", begin):
        return _ogg_starts(data, begin, name, cancelled)
    for mark in (_FLAC, _CAF):
        if data.startswith(mark.pattern[:4], begin):
            found = mark.finditer(data, begin + 1)
            return itertools.chain([0], map(re.Match.start, found))
    if data.startswith((b"RIFF", b"RIFX", b"FORM")):
        return _chunk_starts(data, cancelled)
    return _mpeg_starts(data, begin, cancelled)


def _check_nothing_else(data: bytes, starts: list[int], name: str) -> None:
    """Raise InvalidAudio if a file of another kind stands behind these recordings."""
    first = _behind_tags(data, starts[0])
    own = _kind_at(data, first)
    begin = first
    if own not in _OPEN_ENDED:
        begin = _end_of(data, starts[-1], own)
    for kind, mark in _signatures().items():
        if kind != own and mark.search(data, begin):
            raise InvalidAudio(
                f"{name} is a recording of {own} with a file of {kind} joined to it; split it first"
            )


def _kind_at(data: bytes, at: int) -> str:
    for kind, mark in _signatures().items():
        if mark.match(data, at):
            return kind
    return "mp3"


@cache
def _signatures() -> dict[str, re.Pattern[bytes]]:
    return {kind: re.compile(first, re.DOTALL) for kind, first in _SIGNATURES.items()}


def _end_of(data: bytes, at: int, kind: str) -> int:
    """Return where a recording of a kind that says it ends."""
    if kind == "ogg":
        return data.rfind(b"OggS") + _OGG_HEAD
    order: Literal["big", "little"] = "big"
    if data.startswith((b"RIFF", b"RF64"), at):
        order = "little"
    return at + 8 + int.from_bytes(data[at + 4 : at + 8], order)


def _chunk_starts(data: bytes, cancelled: Cancelled) -> Iterator[int]:
    """Yield the beginnings of chunks of the first one's kind, one behind another."""
    at, kind = 0, data[:4]
    order: Literal["big", "little"] = "big"
    if kind == b"RIFF":
        order = "little"
    while data.startswith(kind, at) and len(data) >= at + 12:
        cancelled.check()
        yield at
        size = int.from_bytes(data[at + 4 : at + 8], order)
        at += 8 + size + size % 2


def _behind_tags(data: bytes, at: int) -> int:
    """Return where ID3 and APE tags at ``at`` end."""
    for _ in range(_MAX_TAGS):
        size = _size_of_tag(data, at)
        if not size:
            break
        at += size
    return at


def _size_of_tag(data: bytes, at: int) -> int:
    """Return the bytes of a tag at ``at``; 0 if there is none."""
    if data.startswith(b"TAG", at):
        return _ID3_TAIL
    if data.startswith(b"ID3", at) and len(data) >= at + _ID3_HEAD:
        size = 0
        for byte in data[at + 6 : at + _ID3_HEAD]:
            size = size << 7 | byte & 0x7F
        return _ID3_HEAD + size
    if data.startswith(b"APETAGEX", at) and len(data) >= at + _APE_HEAD:
        return _APE_HEAD + int.from_bytes(data[at + 12 : at + 16], "little")
    return 0


# Ogg
# ---------------------------------------------------------------------------------------------------------------------


def _ogg_starts(data: bytes, at: int, name: str, cancelled: Cancelled) -> Iterator[int]:
    """Yield the first page of each link of a chain, whose streams' first pages stand together."""
    alive, begun = set[bytes](), set[bytes]()
    is_in_link = True  # behind the first pages of one
    for number, page in enumerate(_ogg_pages(data, at)):
        if number % _TURN == _TURN - 1:
            cancelled.check()
        if page.is_first:
            if is_in_link:
                _check_ended(alive, name)
                yield page.at
            alive.add(page.serial)
            begun.add(page.serial)
        elif page.serial not in begun:
            # whose first page is in the middle of one that was cut
            raise InvalidAudio(
                f"{name} is damaged: a page of it belongs to no stream that began"
            )
        is_in_link = not page.is_first
        if page.is_last and page.end <= len(data):
            alive.discard(page.serial)
    _check_ended(alive, name)


class _Page(NamedTuple):
    """A page's first byte, the one behind its last, its stream, and whether it is that stream's first or last."""

    at: int
    end: int
    serial: bytes
    is_first: bool
    is_last: bool


def _ogg_pages(data: bytes, at: int) -> Iterator[_Page]:
    while (at := data.find(b"OggS", at)) >= 0 and len(data) >= at + _OGG_HEAD:
        flags, serial, segments = data[at + 5], data[at + 14 : at + 18], data[at + 26]
        body = at + _OGG_HEAD + segments
        end = body + sum(data[at + _OGG_HEAD : body])
        is_first, is_last = bool(flags & _OGG_FIRST), bool(flags & _OGG_LAST)
        yield _Page(at, end, serial, is_first, is_last)
        at = end


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
_FIRST_RATES = {layer: _RATES_OF_BITS[1, layer] for layer in (1, 2, 3)}
_LATER_RATES = {layer: _RATES_OF_BITS[2, min(layer, 2)] for layer in (1, 2, 3)}


@dataclass(frozen=True)
class _Version:
    """A version of MPEG, in tenths, and what follows from it.

    Attributes:
        divisor: Of the sample rates of version 1.
        rates_of_bits: Kilobits a second by layer, then by the header's number less 1.
        bytes_at_a_bit: A frame's bytes at one bit a second and one sample a second, by layer (2 and 3).
        side_bytes: Of side information, in stereo and mono.
    """

    tenths: int
    divisor: int
    rates_of_bits: Mapping[int, Sequence[int]]
    bytes_at_a_bit: Mapping[int, int]
    side_bytes: tuple[int, int]


_LATER_BYTES = {1: 0, 2: 144, 3: 72}
#: By the header's two bits, of which 1 has no meaning.
_VERSIONS = {
    3: _Version(10, 1, _FIRST_RATES, {1: 0, 2: 144, 3: 144}, (32, 17)),
    2: _Version(20, 2, _LATER_RATES, _LATER_BYTES, (17, 9)),
    0: _Version(25, 4, _LATER_RATES, _LATER_BYTES, (17, 9)),
}
#: Samples a second of version 1.
_HERTZ = (44_100, 48_000, 32_000)
#: The first three bytes of a frame's header whose numbers have a meaning.
_THIRD = bytes(number for number in range(0x10, 0xF0) if number >> 2 & 3 != 3)
_HEADER = re.compile(
    rb"\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff][" + re.escape(_THIRD) + rb"]", re.DOTALL
)
#: Frames that a header may leave out before what follows counts as another recording.
_FEW = 4
#: More frames than a file has, where no list of contents says how many a recording has.
_UNLISTED = 1 << 62
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
    if len(header) < 4 or not _HEADER.match(header):
        return None
    version = _VERSIONS[header[1] >> 3 & 3]
    layer = 4 - (header[1] >> 1 & 3)
    hertz = _HERTZ[header[2] >> 2 & 3] // version.divisor
    table = version.rates_of_bits[layer]
    per_second = table[(header[2] >> 4) - 1] * 1000
    padding = header[2] >> 1 & 1
    is_mono = header[3] >> 6 == 3
    size = version.bytes_at_a_bit[layer] * per_second // hertz + padding
    if layer == 1:  # in slots of four bytes
        size = (12 * per_second // hertz + padding) * 4
    kind = (version.tenths, layer, hertz, is_mono)
    return _Frame(size, kind, 4 + version.side_bytes[is_mono])


def _announced(data: bytes, at: int, frame: _Frame) -> int | None:
    """Return the frames that a recording's first one lists (0 if it does not say); None if it is no such frame."""
    mark = at + frame.contents
    if data.startswith(b"VBRI", at + 36):
        return int.from_bytes(data[at + 50 : at + 54], "big")
    if not data.startswith((b"Xing", b"Info"), mark):
        return None
    flags = int.from_bytes(data[mark + 7 : mark + 8], "big")
    return int.from_bytes(data[mark + 8 : mark + 12], "big") * (flags & 1)


def _mpeg_starts(data: bytes, at: int, cancelled: Cancelled) -> Iterator[int]:
    """Yield where recordings begin: at a list of contents, behind as many frames as one lists, at another rate."""
    kind: tuple[int, int, int, bool] | None = None
    left = _UNLISTED  # frames that the list of contents still has
    over: list[int] = []  # frames behind those
    for place, frame in _frames(data, at, cancelled):
        listed = _announced(data, place, frame)
        if listed is not None or frame.kind != kind:
            yield place
            kind, left, over = frame.kind, listed or _UNLISTED, []
            continue
        left -= 1
        if left >= 0:
            continue
        over.append(place)
        if len(over) > _FEW:
            yield over[0]
            left, over = _UNLISTED, []


def _with_contents(data: bytes, at: int, cancelled: Cancelled) -> bytes:
    """Put a list of contents before an MP3 that has none: libsndfile guesses its length from the first frame alone."""
    first = _frame(data[at : at + 4])
    if first is None or first.kind[1] != 3:
        return data
    if _announced(data, at, first) is not None:
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
    """Yield the frames from ``at`` on, each with its place; what stands between them is left out."""
    turns, tries, kind = 0, 0, None
    while at < len(data):
        turns += 1
        if turns % _TURN == 0:
            cancelled.check()
        frame = _frame_at(data, at, kind)
        if frame is not None:
            yield at, frame
            kind = frame.kind
            at += frame.size
            continue
        tag = _behind_tags(data, at) - at
        if tag:
            at += tag
            continue
        found = _HEADER.search(data, at + 1)
        if found is None or tries == _MAX_TRIES:
            return
        at = found.start()
        tries += 1


def _frame_at(
    data: bytes, at: int, kind: tuple[int, int, int, bool] | None
) -> _Frame | None:
    """Return the frame at ``at``, if it is of the kind of those before it, or a recording goes on behind it."""
    frame = _frame(data[at : at + 4])
    if frame is None or frame.kind == kind:
        return frame
    if _follows(data, at + frame.size, frame):
        return frame
    return None


def _follows(data: bytes, at: int, frame: _Frame) -> bool:
    """Whether another frame of a recording, tags or the file's end are at ``at``."""
    after = _frame(data[at : at + 4])
    if after is not None:
        return after.kind == frame.kind
    if at >= len(data):
        return at == len(data)
    return _behind_tags(data, at) > at
