"""Rows, and the protocol of sources."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlm_batch.errors import VLMBatchError
from vlm_batch.inputs.fetch import is_data_uri
from vlm_batch.types import Audio, ImageInput, Message, Request, Video

if TYPE_CHECKING:
    from vlm_batch.jobs.cells import Columns


class InvalidJob(VLMBatchError, ValueError):
    """A job cannot begin as asked; users see the one-line message."""


def as_it_is(request: Request) -> Request:
    return request


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """One row to ask about.

    ``load`` reads the pictures named by ``images``, and ``shown`` changes the request as its publisher wants them shown.
    ``strange`` columns are mistakes unless the job names them.
    ``error`` says why the row cannot be asked. ``is_scanned``: pictures that the row has were left out.
    """

    id: str
    images: tuple[ImageInput, ...] = ()
    videos: tuple[Video, ...] = ()
    audios: tuple[Audio, ...] = ()
    prompt: str | None = None
    messages: Sequence[Message] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    strange: tuple[str, ...] = ()
    load: Callable[[], Sequence[ImageInput]] | None = None
    shown: Callable[[Request], Request] = as_it_is
    error: str | None = None
    is_scanned: bool = False

    @property
    def asks_itself(self) -> bool:
        """Whether the row has a prompt or a chat of its own."""
        return self.prompt is not None or self.messages is not None

    @property
    def asks_about_media(self) -> bool:
        """Whether the row has pictures or videos, or a chat, which may."""
        return bool(self.images or self.videos) or self.messages is not None

    def pictures(self) -> Sequence[ImageInput]:
        """Return the pictures, read if they are in pages or archives."""
        return self.images if self.load is None else self.load()

    @property
    def image_names(self) -> list[str]:
        return [name_of(image) for image in self.images]

    @property
    def sources(self) -> list[Any]:
        """The files or data of its media."""
        images = self.images if self.load is None else ()
        return [
            *images,
            *(video.source for video in self.videos),
            *(audio.source for audio in self.audios),
        ]


class Source:
    """An iterable of rows.

    Every row has ``columns``. With ``is_once``, rows can be read only once. With ``numbered``, some ids are positions.
    """

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def columns(self) -> tuple[str, ...] | None:
        return None

    @property
    def is_once(self) -> bool:
        return False

    @property
    def found(self) -> Columns | None:
        """The columns of a table that all of its rows have."""
        return None

    @property
    def numbered(self) -> bool:
        if self.found is None:
            return False
        return self.found.id is None or self._has_places()

    def _has_places(self) -> bool:
        try:
            return any(
                row.error is None and row.id.startswith(f"{self.name}:")
                for row in self.scan()
            )
        except Exception:  # the file is damaged: the plan says so, of its last row
            return False

    def rows(self) -> Iterator[JobRow]:
        """Yield all rows; unreadable ones have an ``error``."""
        raise NotImplementedError

    def scan(self) -> Iterator[JobRow]:
        """Yield rows without reading pictures."""
        return self.rows()


@dataclass(frozen=True)
class SourceFile(Source):
    path: str

    @property
    def name(self) -> str:
        return self.path


class Ids:
    """A set of ids, stored as 64-bit digests."""

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self._digests = {digest(one) for one in ids}

    def __contains__(self, one: str) -> bool:
        return digest(one) in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, one: str) -> bool:
        """Add an id; return False if it was there."""
        number = digest(one)
        if number in self._digests:
            return False
        self._digests.add(number)
        return True


#: Lone surrogates, which stand for bytes of names that are not UTF-8.
_NO_UTF8 = re.compile("[\ud800-\udfff]")


def spelled(text: str, backslash: str = "\\") -> str:
    """Return valid UTF-8, with escapes for other bytes: ``caf\\xe9.png``."""

    def code(match: re.Match[str]) -> str:
        value = ord(match[0])
        if 0xDC80 <= value <= 0xDCFF:
            return f"{backslash}x{value - 0xDC00:02x}"
        return f"{backslash}u{value:04x}"

    return _NO_UTF8.sub(code, text)


def count_of(number: int, noun: str) -> str:
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}s"


def digest(text: str) -> int:
    """Return a text's 64-bit digest."""
    found = hashlib.blake2b(spelled(text).encode(), digest_size=8)
    return int.from_bytes(found.digest(), "big")


_SHARD = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True)
class Shard:
    """Part ``number`` of ``count``, from 1, by digests of ids."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise InvalidJob(
                f"shard {self.number}/{self.count} is not one of 1/{self.count} to {self.count}/{self.count}"
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def has(self, row_id: str) -> bool:
        return digest(row_id) % self.count == self.number - 1

    @staticmethod
    def parse(text: str) -> Shard:
        """Parse what a user typed. Raises InvalidJob."""
        match = _SHARD.fullmatch(text)
        if match is None:
            raise InvalidJob(f"shard {text!r} is not of the form 2/4")
        return Shard(int(match[1]), int(match[2]))


def name_of(image: ImageInput) -> str:
    """Return what a message calls a picture."""
    if is_data_uri(image):
        return f"data URI of {len(image):,} characters"
    if isinstance(image, (bytes, bytearray, memoryview)):
        return f"{len(image):,} bytes"
    if isinstance(image, Mapping):
        return type(image).__name__
    return str(image)
