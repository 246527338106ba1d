"""Text tables: JSON lines, CSV and TSV."""

from __future__ import annotations

import codecs
import csv
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TextIO

from vlm_batch.checks import parse_json
from vlm_batch.jobs.cells import (
    AUDIO_COLUMNS,
    FILE_NAMES,
    ID_COLUMNS,
    PICTURE_NAMES,
    VIDEO_COLUMNS,
    Columns,
    id_of,
    names_media,
    row_of_cells,
)
from vlm_batch.jobs.openai import row_of_body
from vlm_batch.jobs.rows import InvalidJob, JobRow, SourceFile, digest

#: Keys of a request in JSON. Others are columns that the job names, or mistakes.
MEDIA_NAMES = (*PICTURE_NAMES, *FILE_NAMES, *VIDEO_COLUMNS, *AUDIO_COLUMNS)
REQUEST_KEYS = (*MEDIA_NAMES, *ID_COLUMNS, "prompt", "messages", "params")


@dataclass(frozen=True)
class JsonLines(SourceFile):
    """JSON requests, one a line: ``{"id", "image"/"images", "prompt"/"messages", "params", ...}`` or OpenAI's batch
    form."""

    own: Columns
    stream: Iterable[str] | None = None

    @property
    def is_once(self) -> bool:
        return self.stream is not None

    @property
    def numbered(self) -> bool:
        return self._has_places()

    def _has_places(self) -> bool:
        try:
            with open_text(self.path) as lines:
                return any(map(self._is_place, lines, self._places()))
        except Exception:  # as in the base class; standard input is no file
            return False

    def _places(self) -> Iterator[str]:
        for number in itertools.count(1):
            yield f"{self.path}:{number}"

    def _is_place(self, line: str, place: str) -> bool:
        """Whether a line's id is its place; only lines without ids of their own are read as rows."""
        cells = _cells_of(line)
        if cells is None or self._names_itself(cells, place):
            return False
        row = self._row(line, place)
        return row.error is None and row.id == place

    def _names_itself(self, cells: dict[str, Any], place: str) -> bool:
        """Whether a line surely has an id of its own."""
        names: Sequence[str] = ID_COLUMNS
        if "body" in cells:
            names = ("custom_id",)
        elif self.own.id is not None:
            names = (self.own.id,)
        own_id = next(filter(_is_given, map(cells.get, names)), None)
        if own_id is None or isinstance(own_id, (list, dict)):
            return False
        return id_of(own_id, place) != place

    def rows(self) -> Iterator[JobRow]:
        if self.stream is not None:
            yield from self._rows_of(self.stream)
            return
        with open_text(self.path) as lines:
            yield from self._rows_of(lines)

    def _rows_of(self, lines: Iterable[str]) -> Iterator[JobRow]:
        for place, line in zip(self._places(), lines, strict=False):
            if not line.strip():
                continue
            row = self._row(line, place)
            # of other lines in the next run: their ids are others
            if self.is_once and row.id == place:
                row = replace(row, id=f"{place}:{digest(line.strip()):016x}")
            yield row

    def _row(self, line: str, place: str) -> JobRow:
        def wrong(error: str) -> JobRow:
            return JobRow(id=place, error=f"{place}: the line {error}")

        try:
            cells = parse_json(line)
        except ValueError as error:
            return wrong(f"is not JSON: {error}")
        if not isinstance(cells, dict):
            return wrong(f"is {type(cells).__name__}, not an object")
        if "body" in cells and "custom_id" in cells:
            return row_of_body(cells, place)
        return self._request(cells, place)

    def _request(self, cells: dict[str, Any], place: str) -> JobRow:
        prompt, messages = cells.get(self.own.prompt or "prompt"), cells.get("messages")
        params = cells.get("params") or {}
        try:
            columns = self._columns_of(cells)
        except InvalidJob as error:
            return JobRow(id=place, columns=cells, error=f"{place}: {error}")
        folder = os.path.dirname(self.path)
        row = row_of_cells(cells, columns, place=place, folder=folder)
        wrong = _wrong(prompt, messages, params)
        if wrong is not None and row.error is None:
            return replace(row, error=f"{place}: {wrong}")
        known = {*REQUEST_KEYS, *vars(self.own).values()}
        strange = itertools.filterfalse(known.__contains__, cells)
        return replace(
            row,
            prompt=prompt,
            messages=messages,
            params=params,
            strange=tuple(strange),
        )

    def _columns_of(self, cells: dict[str, Any]) -> Columns:
        """Return where a line's media are. Raises InvalidJob."""
        named = set(vars(self.own).values())
        nulls = {name for name, value in cells.items() if value is None}
        said = itertools.filterfalse((nulls - named).__contains__, cells)
        columns = _resolved(self.own, tuple(said))
        if not columns.has_media:
            # null is no picture by mistake, unless the row is a chat
            empty = next(filter(cells.__contains__, MEDIA_NAMES), None)
            columns = replace(columns, image=empty)
        is_chat = cells.get("messages") is not None
        if is_chat and columns.image in nulls:
            return replace(columns, image=None)
        return columns


def _is_given(value: Any) -> bool:
    return value is not None


def _cells_of(line: str) -> dict[str, Any] | None:
    """Return the object that a line holds; None if it holds none."""
    if not line.strip():
        return None
    try:
        cells = parse_json(line)
    except ValueError:
        return None
    if isinstance(cells, dict):
        return cells
    return None


@lru_cache(maxsize=256)
def _resolved(own: Columns, names: tuple[str, ...]) -> Columns:
    """Resolve the names in a line. Most lines of a file have the same."""
    return own.resolve(names, "the line")


def _wrong(prompt: Any, messages: Any, params: Any) -> str | None:
    """Return what is wrong with the values of a request's keys; None if nothing is."""
    for name, value, kind in (
        ("prompt", prompt, str),
        ("messages", messages, list),
        ("params", params, dict),
    ):
        if value is not None and not isinstance(value, kind):
            return f"{name} is {type(value).__name__}, not {kind.__name__}"
    if prompt is not None and messages is not None:
        return "prompt and messages exclude each other"
    return None


def open_text(path: str) -> TextIO:
    """Open a text file in UTF-8, or UTF-16 with a byte order mark."""
    encoding = "utf-8-sig"
    try:
        with open(path, "rb") as file:
            first = file.read(2)
        if first in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            encoding = "utf-16"
        return open(path, encoding=encoding, errors="surrogateescape", newline="")
    except OSError as error:
        raise InvalidJob(f"cannot read {path}: {error.strerror}") from error


@dataclass(frozen=True)
class Delimited(SourceFile):
    """A CSV or TSV file with a header."""

    own: Columns

    @property
    def columns(self) -> tuple[str, ...]:
        with open_text(self.path) as file:
            return tuple(self._reader(file)[0])

    @property
    def found(self) -> Columns:
        return self.own.resolve(self.columns, self.path)

    def rows(self) -> Iterator[JobRow]:
        with open_text(self.path) as file:
            names, reader = self._reader(file)
            columns = self.own.resolve(names, self.path)
            while True:
                place = f"{self.path}:{reader.line_num + 1}"
                try:
                    cells = next(reader, None)
                except csv.Error as error:  # Python 3.10 takes no NUL
                    yield JobRow(id=place, error=f"{place}: {error}")
                    continue
                if cells is None:
                    return
                if cells:
                    yield self._row(names, cells, columns, place)

    def _row(
        self, names: list[str], cells: list[str], columns: Columns, place: str
    ) -> JobRow:
        if len(cells) != len(names):
            return JobRow(
                id=place,
                error=f"{place}: {len(cells)} cells under {len(names)} columns; quote cells with separators",
            )
        return row_of_cells(
            dict(zip(names, cells, strict=True)),
            columns,
            place=place,
            folder=os.path.dirname(self.path),
        )

    def _reader(self, file: TextIO) -> tuple[list[str], Any]:
        csv.field_size_limit(2**31 - 1)
        header = file.readline()
        separator = "\t"
        if not self.path.lower().endswith(".tsv"):
            separator = max(",;\t|", key=header.count)
        file.seek(0)
        reader = csv.reader(file, delimiter=separator)
        names = next(reader, [])
        self._check_header(names)
        return names, reader

    def _check_header(self, names: list[str]) -> None:
        if not any(names):
            raise InvalidJob(
                f"{self.path} has no header: its first line must name the columns"
            )
        folder = os.path.dirname(self.path)
        for name in names:
            if names_media(name, folder):
                raise InvalidJob(
                    f"{self.path} has no header: its first line names a picture ({name}), and must name the columns"
                )
        twice = Counter(names) - Counter(set(names))
        if twice:
            raise InvalidJob(
                f"{self.path} has the column {min(twice)!r} twice; rename one"
            )
