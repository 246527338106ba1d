"""Outputs written whole: CSV, TSV and Parquet."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from vlm_batch.jobs.lines import Record, no_output

#: Rows of a Parquet row group.
GROUP_ROWS = 1000


class Format(Protocol):
    def read(self, path: Path) -> Iterator[Record]: ...
    def write(
        self,
        path: Path,
        records: Callable[[], Iterator[Record]],
        columns: tuple[str, ...],
    ) -> None:
        """Write the file; ``records`` starts over each time."""
        ...


#: Texts that a spreadsheet would run (OWASP, "CSV Injection": these characters at a cell's beginning), behind any marks.
_FORMULA = re.compile(r"(?P<marks>'*)[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def neutralised(text: str) -> str:
    """Return a text that no spreadsheet runs as a formula: with a ' before it, which ``restored`` takes away."""
    is_plain = _FORMULA.match(text) is None or _NUMBER.fullmatch(text) is not None
    return text if is_plain else f"'{text}"


def restored(text: str) -> str:
    """Return the text that was ``neutralised``."""
    found = _FORMULA.match(text)
    return text[1:] if found is not None and found["marks"] else text


class DelimitedFile:
    """CSV or TSV; lists and objects are JSON.

    ``is_safe``: texts that a spreadsheet would run as formulas are neutralised.
    """

    def __init__(self, separator: str = ",", *, is_safe: bool = True) -> None:
        self.separator = separator
        self.is_safe = is_safe

    def read(self, path: Path) -> Iterator[Record]:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.reader(file, delimiter=self.separator)
            names = [self._text(name) for name in next(reader, [])]
            if "id" not in names:
                raise no_output(path, "it has no column id")
            for cells in reader:
                if cells:
                    yield dict(
                        zip(
                            names,
                            [self._text(cell) or None for cell in cells],
                            strict=False,
                        )
                    )

    def write(
        self,
        path: Path,
        records: Callable[[], Iterator[Record]],
        columns: tuple[str, ...],
    ) -> None:
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter=self.separator, lineterminator="\n")
            writer.writerow([self._cell(name) for name in columns])
            for record in records():
                writer.writerow([self._cell(record.get(name)) for name in columns])

    def _text(self, cell: str) -> str:
        return restored(cell) if self.is_safe else cell

    def _cell(self, value: Any) -> Any:
        cell = (
            json.dumps(value, ensure_ascii=False)
            if isinstance(value, (list, dict, tuple))
            else value
        )
        return neutralised(cell) if self.is_safe and isinstance(cell, str) else cell


class ParquetFile:
    """Parquet; values decide a column's type."""

    def read(self, path: Path) -> Iterator[Record]:
        import pyarrow.parquet as pq

        try:
            file = pq.ParquetFile(path)
        except Exception as error:  # not Parquet, or damaged
            raise no_output(path, f"it cannot be read as Parquet: {error}") from error
        if "id" not in file.schema_arrow.names:
            raise no_output(path, "it has no column id")
        for batch in file.iter_batches(batch_size=GROUP_ROWS):
            yield from batch.to_pylist()

    def write(
        self,
        path: Path,
        records: Callable[[], Iterator[Record]],
        columns: tuple[str, ...],
    ) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = _schema(records(), columns)
        with pq.ParquetWriter(path, schema) as writer:
            for group in _groups(records()):
                cells = {
                    one.name: [
                        _typed(record.get(one.name), one.type == pa.string())
                        for record in group
                    ]
                    for one in schema
                }
                writer.write_table(pa.Table.from_pydict(cells, schema=schema))


def _schema(records: Iterator[Record], columns: tuple[str, ...]) -> Any:
    """Give each column its common type, or text."""
    import pyarrow as pa

    fields = {name: pa.field(name, pa.null()) for name in columns}
    for group in _groups(records):
        for name in columns:
            try:
                here = pa.field(
                    name,
                    pa.array(
                        [_typed(record.get(name), False) for record in group]
                    ).type,
                )
                fields[name] = pa.unify_schemas(
                    [pa.schema([fields[name]]), pa.schema([here])],
                    promote_options="permissive",
                ).field(0)
            except (pa.ArrowException, OverflowError, TypeError, ValueError):
                # no type holds all of them
                fields[name] = pa.field(name, pa.string())
    return pa.schema(
        [
            pa.field(name, pa.string()) if one.type == pa.null() else one
            for name, one in fields.items()
        ]
    )


def _groups(records: Iterator[Record]) -> Iterator[list[Record]]:
    while group := list(itertools.islice(records, GROUP_ROWS)):
        yield group


def _typed(value: Any, as_text: bool) -> Any:
    is_other = value is not None and as_text and not isinstance(value, str)
    return json.dumps(value, ensure_ascii=False) if is_other else value
