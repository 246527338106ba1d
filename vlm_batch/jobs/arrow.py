"""Arrow tables: Parquet files and Hugging Face datasets."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_batch.jobs.cells import Columns, row_of_cells
from vlm_batch.jobs.rows import InvalidJob, JobRow, Source, SourceFile

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows read at a time: pictures in cells are large.
BATCH_ROWS = 16


@dataclass(frozen=True)
class _Opened:
    folder: str
    names: list[str]
    pictures: list[str]
    num_rows: int
    batches: Callable[[list[str]], Iterable[Any]]


class ArrowTable(Source):
    """A table with pictures as bytes, structs of bytes and path, or paths."""

    own: Columns

    def _open(self) -> _Opened:
        raise NotImplementedError

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._open().names)

    @property
    def found(self) -> Columns:
        return self._columns(self._open())

    def rows(self) -> Iterator[JobRow]:
        return self._rows(with_pictures=True)

    def scan(self) -> Iterator[JobRow]:
        return self._rows(with_pictures=False)

    def _columns(self, opened: _Opened) -> Columns:
        return self.own.resolve(opened.names, self.name, opened.pictures)

    def _rows(self, *, with_pictures: bool) -> Iterator[JobRow]:
        opened = self._open()
        columns = self._columns(opened)
        left_out = set(opened.pictures)
        if with_pictures:
            left_out.discard(columns.image or "")
        kept = list(itertools.filterfalse(left_out.__contains__, opened.names))
        if not kept:
            yield from self._without_columns(opened.num_rows)
            return
        is_scanned = columns.image is not None and columns.image not in kept
        if is_scanned:
            columns = replace(columns, image=None)
        for number, cells in enumerate(rows_of(opened.batches(kept))):
            place = f"{self.name}:{number}"
            row = row_of_cells(cells, columns, place=place, folder=opened.folder)
            yield replace(row, is_scanned=is_scanned)

    def _without_columns(self, num_rows: int) -> Iterator[JobRow]:
        """Yield rows of pictures and nothing else: batches without columns have no rows."""
        for number in range(num_rows):
            yield JobRow(id=f"{self.name}:{number}", is_scanned=True)


@dataclass(frozen=True)
class Parquet(ArrowTable, SourceFile):
    own: Columns

    def _open(self) -> _Opened:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            file = pq.ParquetFile(self.path, buffer_size=1 << 20)
        except OSError as error:
            raise InvalidJob(
                f"cannot read {self.path}: {error.strerror or error}"
            ) from error
        except pa.ArrowException as error:
            raise InvalidJob(f"{self.path} is no Parquet file: {error}") from error
        schema = file.schema_arrow

        def batches(columns: list[str]) -> Iterable[pa.RecordBatch]:
            return file.iter_batches(batch_size=BATCH_ROWS, columns=columns)

        return _Opened(
            os.path.dirname(self.path),
            schema.names,
            picture_columns(schema),
            file.metadata.num_rows,
            batches,
        )


def picture_columns(schema: pa.Schema) -> list[str]:
    """Return columns of bytes, also in structs and lists."""
    return [one.name for one in schema if _holds_bytes(one.type)]


def _holds_bytes(kind: pa.DataType) -> bool:
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind):
        return _holds_bytes(kind.value_type)
    if types.is_struct(kind):
        at = kind.get_field_index("bytes")
        return at >= 0 and _holds_bytes(kind.field(at).type)
    are_bytes = (types.is_binary, types.is_large_binary, types.is_binary_view)
    return any(is_one(kind) for is_one in are_bytes)


def is_dataset(folder: str) -> bool:
    """Whether ``save_to_disk`` wrote the folder."""
    path = Path(folder)
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def datasets_in(folder: str, own: Columns, split: str | None) -> list[HuggingFace]:
    """Open a folder that ``save_to_disk`` wrote. Raises InvalidJob."""
    import datasets

    try:
        loaded = datasets.load_from_disk(folder)
    except Exception as error:  # whatever the reader raises for a damaged folder
        raise InvalidJob(f"cannot read the dataset {folder}: {error}") from error
    if isinstance(loaded, datasets.Dataset):
        return [HuggingFace(folder, loaded, own)]
    splits = dict(loaded)
    if split is not None:
        if split not in splits:
            raise InvalidJob(
                f"{folder} has no split {split!r}; it has {', '.join(splits)}"
            )
        splits = {split: splits[split]}
    top = folder.rstrip(os.sep)
    return [HuggingFace(f"{top}/{name}", one, own) for name, one in splits.items()]


@dataclass(frozen=True)
class HuggingFace(ArrowTable, SourceFile):
    dataset: Any
    own: Columns

    def _open(self) -> _Opened:
        def batches(columns: list[str]) -> Iterable[Any]:
            return stored(self.dataset.select_columns(columns))

        return _Opened(
            "",
            self.dataset.column_names,
            picture_features(self.dataset),
            len(self.dataset),
            batches,
        )


def rows_of(batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of Arrow's batches."""
    for batch in batches:
        yield from batch.to_pylist()


def stored(dataset: Any) -> Iterable[Any]:
    """Yield undecoded batches."""
    return dataset.with_format("arrow").iter(batch_size=BATCH_ROWS)  # type: ignore[no-any-return]


def picture_features(dataset: Any) -> list[str]:
    """Return picture columns by features."""
    import datasets

    found = []
    for name, kind in (dataset.features or {}).items():
        if isinstance(kind, (datasets.List, datasets.LargeList)):
            kind = kind.feature
        if isinstance(kind, datasets.Image):
            found.append(name)
    return found
