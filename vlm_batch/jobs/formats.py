"""Outputs written whole: CSV, TSV and Parquet."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from vlm_batch.jobs.lines import Record, no_output

#: Rows of a Parquet row group.
GROUP_ROWS = 1000


class Format(Protocol):
    def read(self, path: Path) -> Iterator[Record]: ...
    def write(self, path: Path, records: Callable[[], Iterator[Record]], columns: tuple[str, ...]) -> None:
        """Write the file; ``records`` starts over each time."""
        ...


class DelimitedFile:
    """CSV or TSV; lists and objects are JSON."""

    def __init__(self, separator: str = ",") -> None:
        self._separator = separator

    def read(self, path: Path) -> Iterator[Record]:
        with open(path, encoding="utf-8", newline="") as file:
            for record in csv.DictReader(file, delimiter=self._separator):
                if "id" not in record:
                    raise no_output(path, "it has no column id")
                yield {name: value if value != "" else None for name, value in record.items()}

    def write(self, path: Path, records: Callable[[], Iterator[Record]], columns: tuple[str, ...]) -> None:
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter=self._separator, lineterminator="\n")
            writer.writerow(columns)
            for record in records():
                writer.writerow([_cell(record.get(name)) for name in columns])


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

    def write(self, path: Path, records: Callable[[], Iterator[Record]], columns: tuple[str, ...]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = _schema(records(), columns)
        with pq.ParquetWriter(path, schema) as writer:
            for group in _groups(records()):
                cells = {
                    one.name: [_typed(record.get(one.name), one.type == pa.string()) for record in group]
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
                here = pa.field(name, pa.array([_typed(record.get(name), False) for record in group]).type)
                fields[name] = pa.unify_schemas(
                    [pa.schema([fields[name]]), pa.schema([here])], promote_options="permissive"
                ).field(0)
            except (pa.ArrowException, OverflowError, TypeError, ValueError):  # no type holds all of them
                fields[name] = pa.field(name, pa.string())
    return pa.schema([pa.field(name, pa.string()) if one.type == pa.null() else one for name, one in fields.items()])


def _groups(records: Iterator[Record]) -> Iterator[list[Record]]:
    while group := list(itertools.islice(records, GROUP_ROWS)):
        yield group


def _typed(value: Any, as_text: bool) -> Any:
    is_other = value is not None and as_text and not isinstance(value, str)
    return json.dumps(value, ensure_ascii=False) if is_other else value


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict, tuple)) else value
