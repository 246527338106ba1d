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
    if _NUMBER.fullmatch(text) or not _FORMULA.match(text):
        return text
    return f"'{text}"


def restored(text: str) -> str:
    """Return the text that was ``neutralised``."""
    found = _FORMULA.match(text)
    has_mark = found is not None and bool(found["marks"])
    if has_mark:
        return text[1:]
    return text


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
            names = list(map(self._text, next(reader, [])))
            if "id" not in names:
                raise no_output(path, "it has no column id")
            for cells in filter(None, reader):
                texts = [self._text(cell) or None for cell in cells]
                yield dict(zip(names, texts, strict=False))

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
        if self.is_safe:
            return restored(cell)
        return cell

    def _cell(self, value: Any) -> Any:
        if isinstance(value, (list, dict, tuple)):
            value = json.dumps(value, ensure_ascii=False)
        if self.is_safe and isinstance(value, str):
            return neutralised(value)
        return value


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
                cells = {}
                for one in schema:
                    cells[one.name] = [record.get(one.name) for record in group]
                    if one.type == pa.string():
                        cells[one.name] = list(map(_as_text, cells[one.name]))
                writer.write_table(pa.Table.from_pydict(cells, schema=schema))


def _schema(records: Iterator[Record], columns: tuple[str, ...]) -> Any:
    """Give each column its common type, or text."""
    import pyarrow as pa

    types = dict.fromkeys(columns, pa.null())
    for group in _groups(records):
        for name in columns:
            cells = [record.get(name) for record in group]
            types[name] = _common_type(types[name], cells)
    for name, kind in types.items():
        if kind == pa.null():
            types[name] = pa.string()
    return pa.schema(list(types.items()))


def _common_type(kind: Any, cells: list[Any]) -> Any:
    """Return the type that holds values of a type and further ones; text if none does."""
    import pyarrow as pa

    try:
        schemas = [pa.schema({"cell": one}) for one in (kind, pa.array(cells).type)]
        both = pa.unify_schemas(schemas, promote_options="permissive")
        return both.field(0).type
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return pa.string()


def _groups(records: Iterator[Record]) -> Iterator[list[Record]]:
    while group := list(itertools.islice(records, GROUP_ROWS)):
        yield group


def _as_text(value: Any) -> str | None:
    """Return a value of a column of texts: as it is, or as JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
