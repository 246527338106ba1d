"""Stamps of an output's rows: what each asked, and the files that it was about, a line a row in a file beside the output."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vlm_batch.inputs.chats import split_messages
from vlm_batch.inputs.fetch import is_address
from vlm_batch.inputs.media import KINDS
from vlm_batch.jobs.journal import fingerprint, times_of
from vlm_batch.jobs.lines import LineFile, Record, read_answers
from vlm_batch.jobs.questions import Item
from vlm_batch.jobs.rows import InvalidJob, JobRow, digest, spelled
from vlm_batch.types import Audio, Message, Video


class Stamp(NamedTuple):
    """64-bit digests of a row's line.

    Attributes:
        asked: Prompt or messages, and own params.
        media: Media that are no files; None where a scan leaves pictures out.
        times: Sizes and times of the row's files; None without one.
        contents: Their contents.
        paths: Their names.
    """

    asked: int | None
    media: int | None
    times: int | None
    contents: int | None
    paths: int | None

    @classmethod
    def of(cls, line: Record) -> Stamp:
        return cls(*[_digest_of(line, name) for name in cls._fields])

    def asks_else(self, item: Item) -> bool:
        """Whether the row's prompt, messages, params or media have changed."""
        if digest(asked_of(item)) != self.asked:
            return True
        media = media_of(item.row)
        if self.media is None or media is None:
            return False
        return digest(media) != self.media

    def has_other_files(self, row: JobRow) -> bool:
        """Whether the row's files hold something else. Files that are gone have not changed."""
        if row.is_scanned:
            return False
        files = files_of(row)
        times = times_of(files)
        if times:
            if digest(str(times)) == self.times:
                return False
            return digest(str(list(map(fingerprint, files)))) != self.contents
        names = digest(str(list(map(str, files))))
        return self.paths not in (None, names)


def line_of(item: Item) -> Record:
    """Return a row's line, before its media are read."""
    line: Record = {"id": item.id, "asked": asked_of(item)}
    media = media_of(item.row)
    if media is not None:
        line["media"] = media
    files = files_of(item.row)
    times = times_of(files)
    if times:
        line["times"] = times
        line["contents"] = list(map(fingerprint, files))
        line["paths"] = list(map(str, files))
    return line


def _digest_of(line: Record, name: str) -> int | None:
    value = line.get(name)
    if value is None:
        return None
    return digest(str(value))


def asked_of(item: Item) -> str:
    """Return a digest of a row's prompt or messages and its own params; the header has the command line's settings."""
    asked = item.prompt if item.messages is None else item.messages
    return _digest([asked, item.row.params])


def media_of(row: JobRow) -> str | None:
    """Return a digest of media that are no files; None if they are still to be read.

    Files are compared by what they hold, and may be spelled in other ways.
    """
    if row.is_scanned or row.load is not None:
        return None
    return _digest(list(itertools.filterfalse(_is_file, row.sources)))


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=_plain)
    return hashlib.blake2b(spelled(text).encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """Return what JSON can hold of a medium or a chat's part."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    # a picture that an own source holds in memory, of which nothing is kept
    return type(value).__name__


def files_of(row: JobRow) -> list[str | Path]:
    """Return the files that a row is about, those that its chat names, too."""
    sources = list(row.sources)
    if row.messages is not None:
        # what is wrong with a chat, its answer says
        with contextlib.suppress(Exception):
            sources += _media_in(row.messages)
    return list(filter(_is_file, sources))


def _media_in(messages: Sequence[Message]) -> list[Any]:
    """Return the sources of a chat's media."""
    _, media = split_messages(messages, *([()] * len(KINDS)))
    return list(map(_source_of, itertools.chain(*media)))


def _source_of(medium: Any) -> Any:
    if isinstance(medium, (Video, Audio)):
        return medium.source
    return medium


def _is_file(source: Any) -> bool:
    return isinstance(source, (str, Path)) and not is_address(str(source))


class Stamps:
    """The lines of an output's rows."""

    def __init__(self, output: Path) -> None:
        self._path = Path(f"{output}.files")
        self._file: LineFile | None = None

    def read(self) -> dict[int, Stamp]:
        """Return stamps by their ids' digests. Raises InvalidJob for lines of another form."""
        found = {}
        for line in read_answers(self._path):
            if "asked" not in line:
                raise InvalidJob(
                    f"{self._path} does not say what {line['id']!r} asked, so another version of vlm-batch wrote it: go on "
                    "with that one, or name another output"
                )
            found[digest(str(line["id"]))] = Stamp.of(line)
        return found

    def add(self, line: Record) -> None:
        self._file = self._file or LineFile(self._path)
        self._file.append(line)

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
