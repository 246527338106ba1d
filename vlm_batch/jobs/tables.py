"""Tables that are text: JSON lines, CSV and TSV."""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TextIO

from vlm_batch.jobs.cells import FILE_NAMES, ID_COLUMNS, PICTURE_NAMES, VIDEO_COLUMNS, Columns, row_of_cells
from vlm_batch.jobs.openai import row_of_body
from vlm_batch.jobs.rows import InvalidJob, Row, SourceFile

#: What a line of JSON may say of its request. Other keys are columns that the job names, or mistakes.
REQUEST_KEYS = (*PICTURE_NAMES, *FILE_NAMES, *VIDEO_COLUMNS, *ID_COLUMNS, "prompt", "messages", "params")


@dataclass(frozen=True)
class JsonLines(SourceFile):
    """Requests in JSON, a line each: ``{"id", "image"/"images", "prompt"/"messages", "params", ...}`` or OpenAI's batch form.

    Any other key is a column that the job names. ``stream`` is read instead of the file, once.
    """

    own: Columns
    stream: Iterable[str] | None = None
    numbered = True

    @property
    def is_once(self) -> bool:
        return self.stream is not None

    def rows(self) -> Iterator[Row]:
        with contextlib.ExitStack() as stack:
            lines = self.stream
            if lines is None:
                lines = stack.enter_context(open_text(self.path))
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield self._row(line, f"{self.path}:{number}")

    def _row(self, line: str, place: str) -> Row:
        try:
            cells = json.loads(line)
        except ValueError as error:
            return Row(id=place, error=f"{place}: the line is not JSON: {error}")
        except RecursionError:
            return Row(id=place, error=f"{place}: the line is nested too deeply")
        if not isinstance(cells, dict):
            return Row(id=place, error=f"{place}: the line is {type(cells).__name__}, not an object")
        if "body" in cells and "custom_id" in cells:
            return row_of_body(cells, place)
        return self._request(cells, place)

    def _request(self, cells: dict[str, Any], place: str) -> Row:
        named = set(vars(self.own).values())
        try:
            given = self.own.among([name for name in cells if cells[name] is not None or name in named], "the line")
        except InvalidJob as error:
            return Row(id=place, columns=cells, error=f"{place}: {error}")
        if given.image and cells[given.image] is None:
            given = replace(given, image=None)
        row = row_of_cells(cells, given, place=place, folder=os.path.dirname(self.path))
        prompt, messages = cells.get(self.own.prompt or "prompt"), cells.get("messages")
        params = cells.get("params") or {}
        wrong = next(
            (
                f"{name} is {type(value).__name__}, not {kind.__name__}"
                for name, value, kind in (
                    ("prompt", prompt, str),
                    ("messages", messages, list),
                    ("params", params, dict),
                )
                if value is not None and not isinstance(value, kind)
            ),
            next(
                (
                    f"{one} and {other} exclude each other"
                    for one, other in (("prompt", "messages"), ("image", "images"), ("video", "videos"))
                    if cells.get(one) is not None and cells.get(other) is not None
                ),
                None,
            ),
        )
        if wrong is not None and row.error is None:
            return replace(row, error=f"{place}: {wrong}")
        strange = tuple(name for name in cells if name not in REQUEST_KEYS and name not in named)
        return replace(row, prompt=prompt, messages=messages, params=params, strange=strange)


def open_text(path: str) -> TextIO:
    """A text file, with or without a byte order mark; bytes that are no UTF-8 stay what they are. Raises InvalidJob."""
    try:
        return open(path, encoding="utf-8-sig", errors="surrogateescape", newline="")
    except OSError as error:
        raise InvalidJob(f"cannot read {path}: {error.strerror}") from error


@dataclass(frozen=True)
class Delimited(SourceFile):
    """A CSV or TSV file with a header; the separator is the one that the header has most of."""

    own: Columns

    @property
    def columns(self) -> tuple[str, ...]:
        with open_text(self.path) as file:
            return tuple(self._reader(file)[0])

    @property
    def found(self) -> Columns:
        return self.own.among(self.columns, self.path)

    def rows(self) -> Iterator[Row]:
        with open_text(self.path) as file:
            names, reader = self._reader(file)
            columns = self.own.among(names, self.path)
            while True:
                place = f"{self.path}:{reader.line_num + 1}"
                try:
                    cells = next(reader, None)
                except csv.Error as error:  # Python 3.10 takes no NUL
                    yield Row(id=place, error=f"{place}: {error}")
                    continue
                if cells is None:
                    return
                if len(cells) == len(names):
                    folder = os.path.dirname(self.path)
                    yield row_of_cells(dict(zip(names, cells, strict=True)), columns, place=place, folder=folder)
                elif cells:
                    yield Row(id=place, error=f"{place}: {len(cells)} cells under {len(names)} columns")

    def _reader(self, file: TextIO) -> tuple[list[str], Any]:
        csv.field_size_limit(2**31 - 1)
        header = file.readline()
        separator = max(",;\t", key=header.count) if not self.path.lower().endswith(".tsv") else "\t"
        file.seek(0)
        reader = csv.reader(file, delimiter=separator)
        names = next(reader, [])
        if not any(names):
            raise InvalidJob(f"{self.path} has no header: its first line must name the columns")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InvalidJob(f"{self.path} has the column {twice[0]!r} twice")
        return names, reader
