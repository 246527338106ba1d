"""Text tables: JSON lines, CSV and TSV."""

from __future__ import annotations

import codecs
import contextlib
import csv
import os
from collections.abc import Iterable, Iterator
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
        if self.stream is not None:
            return False
        try:
            with open_text(self.path) as lines:
                return any(
                    self._is_place(line, f"{self.path}:{number}")
                    for number, line in enumerate(lines, 1)
                )
        except Exception:  # as in the base class
            return False

    def _is_place(self, line: str, place: str) -> bool:
        """Whether a line's id is its place; only lines without ids of their own are read as rows."""
        if not line.strip():
            return False
        try:
            cells = parse_json(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(cells, dict) or self._names_itself(cells, place):
            return False
        row = self._row(line, place)
        return row.error is None and row.id == place

    def _names_itself(self, cells: dict[str, Any], place: str) -> bool:
        """Whether a line surely has an id of its own."""
        names = ID_COLUMNS if self.own.id is None else (self.own.id,)
        if "body" in cells:
            names = ("custom_id",)
        for name in names:
            own = cells.get(name)
            if own is None:
                continue
            if isinstance(own, (list, dict)):
                return False
            return id_of(own, place) != place
        return False

    def rows(self) -> Iterator[JobRow]:
        with contextlib.ExitStack() as stack:
            lines = self.stream
            if lines is None:
                lines = stack.enter_context(open_text(self.path))
            for number, line in enumerate(lines, 1):
                if line.strip():
                    place = f"{self.path}:{number}"
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
        except RecursionError:
            return wrong("is nested too deeply")
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
        strange = tuple(name for name in cells if name not in known)
        return replace(
            row, prompt=prompt, messages=messages, params=params, strange=strange
        )

    def _columns_of(self, cells: dict[str, Any]) -> Columns:
        """Return where a line's media are. Raises InvalidJob."""
        named = set(vars(self.own).values())
        said = [name for name in cells if cells[name] is not None or name in named]
        columns = _resolved(self.own, tuple(said))
        if not columns.has_media:
            # null is no picture by mistake, unless the row is a chat
            empty = next((name for name in MEDIA_NAMES if name in cells), None)
            columns = replace(columns, image=empty)
        is_chat = cells.get("messages") is not None
        if is_chat and columns.image and cells[columns.image] is None:
            return replace(columns, image=None)
        return columns


@lru_cache(maxsize=256)
def _resolved(own: Columns, names: tuple[str, ...]) -> Columns:
    """Resolve the names in a line. Most lines of a file have the same."""
    return own.resolve(names, "the line")


def _wrong(prompt: Any, messages: Any, params: Any) -> str | None:
    for name, value, kind in (
        ("prompt", prompt, str),
        ("messages", messages, list),
        ("params", params, dict),
    ):
        if value is not None and not isinstance(value, kind):
            return f"{name} is {type(value).__name__}, not {kind.__name__}"
    return (
        "prompt and messages exclude each other"
        if prompt is not None and messages is not None
        else None
    )


def open_text(path: str) -> TextIO:
    """Open a text file in UTF-8, or UTF-16 with a byte order mark."""
    try:
        with open(path, "rb") as file:
            is_wide = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        return open(
            path,
            encoding="utf-16" if is_wide else "utf-8-sig",
            errors="surrogateescape",
            newline="",
        )
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
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidJob(
                f"{self.path} has the column {twice[0]!r} twice; rename one"
            )
