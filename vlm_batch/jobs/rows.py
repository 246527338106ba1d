"""The records of a job: a row of a source, and the protocol of sources."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlm_batch.errors import VLMBatchError
from vlm_batch.types import ImageInput, Message, Video

if TYPE_CHECKING:
    from vlm_batch.jobs.cells import Columns


class InvalidJob(VLMBatchError, ValueError):
    """A job cannot be begun as it was asked for; the message is one line for the user."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: what is asked about, and what it says itself of prompt and sampling.

    ``images`` are pictures, or, where ``load`` is there, the names of those that it reads when it is their turn.
    ``columns`` are what prompts and outputs may name; ``strange`` are those that are mistakes unless they are named.
    ``error`` says why the row cannot be asked at all.
    """

    id: str
    images: tuple[ImageInput, ...] = ()
    videos: tuple[Video, ...] = ()
    prompt: str | None = None
    messages: Sequence[Message] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    strange: tuple[str, ...] = ()
    load: Callable[[], Sequence[ImageInput]] | None = None
    error: str | None = None

    @property
    def image_names(self) -> list[str]:
        """A name for each picture, for the answer's line."""
        return [name_of(image) for image in self.images]


class Source:
    """Rows, one at a time; a source inherits what is not its own.

    ``columns`` are the names that every row has, or None where rows differ. ``is_once``: the rows can be read a single
    time, so nothing is known of them before. ``numbered``: ids are places in the file, so a changed file has other rows.
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
        """What a table's columns hold."""
        return None

    @property
    def numbered(self) -> bool:
        return self.found is not None and self.found.id is None

    def rows(self) -> Iterator[Row]:
        """Every row. A row that cannot be read comes with its ``error``."""
        raise NotImplementedError

    def scan(self) -> Iterator[Row]:
        """The same rows with nothing read that only an answer needs."""
        return self.rows()


@dataclass(frozen=True)
class SourceFile(Source):
    """A source that is one file, and named by its path."""

    path: str

    @property
    def name(self) -> str:
        return self.path


class Ids:
    """A set of ids in a few bytes each: 64 bits of their digest."""

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self._digests = {digest(one) for one in ids}

    def __contains__(self, one: str) -> bool:
        return digest(one) in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, one: str) -> bool:
        """Add an id; False if it was there."""
        number = digest(one)
        if number in self._digests:
            return False
        self._digests.add(number)
        return True


#: How Python holds the bytes of a name that is no UTF-8, and what JSON may have in their place.
_NO_UTF8 = re.compile("[\ud800-\udfff]")


def spelled(text: str, backslash: str = "\\") -> str:
    """A text that is UTF-8: a byte of a name that is none is written as shells and Python take it, ``caf\\xe9.png``."""

    def code(match: re.Match[str]) -> str:
        value = ord(match[0])
        return f"{backslash}x{value - 0xDC00:02x}" if 0xDC80 <= value <= 0xDCFF else f"{backslash}u{value:04x}"

    return _NO_UTF8.sub(code, text)


def digest(text: str) -> int:
    """64 bits that are the same for a text on every machine, and for a name that is no UTF-8 as outputs have it."""
    return int.from_bytes(hashlib.blake2b(spelled(text).encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Shard:
    """Part ``number`` of ``count``, from 1: the rows whose ids' digests fall on it."""

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
        """Read "2/4". Raises InvalidJob."""
        number, slash, count = text.partition("/")
        if not (slash and number.isdigit() and count.isdigit()):
            raise InvalidJob(f"shard {text!r} is not of the form 2/4")
        return Shard(int(number), int(count))


def name_of(image: ImageInput) -> str:
    """A short text that stands for a picture in an answer's line."""
    if isinstance(image, str):
        return image if not image.startswith("data:") else f"data URI of {len(image):,} characters"
    if isinstance(image, (bytes, bytearray, memoryview)):
        return f"{len(image):,} bytes"
    return str(image) if not isinstance(image, Mapping) else type(image).__name__
