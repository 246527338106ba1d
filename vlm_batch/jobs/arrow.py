"""Tables of Arrow: Parquet files, and directories of Hugging Face datasets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vlm_batch.jobs.cells import Columns, row_of_cells
from vlm_batch.jobs.rows import InvalidJob, Row

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows that are read at once from Parquet: pictures in cells are large.
BATCH_ROWS = 16


@dataclass(frozen=True)
class Parquet:
    """A Parquet file. Pictures lie in a column as bytes, as a struct of bytes and path, or as paths."""

    path: str
    own: Columns = field(default_factory=Columns)
    is_once: bool = False

    @property
    def name(self) -> str:
        return self.path

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._open().schema_arrow.names)

    @property
    def numbered(self) -> bool:
        return self._columns().id is None

    def rows(self) -> Iterator[Row]:
        return self._rows(with_pictures=True)

    def scan(self) -> Iterator[Row]:
        return self._rows(with_pictures=False)

    def _rows(self, *, with_pictures: bool) -> Iterator[Row]:
        file, columns = self._open(), self._columns()
        large = set(picture_columns(file.schema_arrow))
        kept = [
            name for name in file.schema_arrow.names if name not in large or (with_pictures and name == columns.image)
        ]
        columns = columns if columns.image in kept else replace(columns, image=None)
        if not kept:  # pictures and nothing else: batches without columns have no rows
            yield from (Row(id=f"{self.path}:{number}") for number in range(file.metadata.num_rows))
            return
        number = 0
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=kept):
            for cells in batch.to_pylist():
                place = f"{self.path}:{number}"
                yield row_of_cells(cells, columns, place=place, folder=os.path.dirname(self.path))
                number += 1

    def _columns(self) -> Columns:
        schema = self._open().schema_arrow
        return self.own.among(schema.names, self.path, picture_columns(schema))

    def _open(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.ParquetFile(self.path, buffer_size=1 << 20)
        except OSError as error:
            raise InvalidJob(f"cannot read {self.path}: {error.strerror or error}") from error
        except pa.ArrowException as error:
            raise InvalidJob(f"{self.path} is no Parquet file: {error}") from error


def picture_columns(schema: pa.Schema) -> list[str]:
    """The columns that hold pictures themselves: bytes, structs of bytes and path, or lists of either."""
    import pyarrow as pa

    def holds_bytes(kind: pa.DataType) -> bool:
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return holds_bytes(kind.value_type)
        if pa.types.is_struct(kind):
            return any(one.name == "bytes" and holds_bytes(one.type) for one in kind)
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))

    return [one.name for one in schema if holds_bytes(one.type)]


def is_dataset(folder: str) -> bool:
    """True for a folder written by ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk``."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("state.json", "dataset_dict.json"))


def datasets_in(folder: str, own: Columns, split: str | None = None) -> list[HuggingFace]:
    """The splits of a directory, or the one that is named. Raises InvalidJob."""
    import datasets

    try:
        loaded = datasets.load_from_disk(folder)
    except Exception as error:  # whatever the reader raises for a damaged folder
        raise InvalidJob(f"cannot read the dataset {folder}: {error}") from error
    if isinstance(loaded, datasets.Dataset):
        return [HuggingFace(folder, loaded, own)]
    if split is not None and split not in loaded:
        raise InvalidJob(f"{folder} has no split {split!r}; it has {', '.join(loaded)}")
    names = [split] if split is not None else list(loaded)
    return [HuggingFace(f"{folder.rstrip(os.sep)}/{name}", loaded[name], own) for name in names]


@dataclass(frozen=True)
class HuggingFace:
    """A dataset of the ``datasets`` library. Pictures stay as they were stored until they are asked about."""

    name: str
    dataset: Any
    own: Columns = field(default_factory=Columns)
    is_once: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.dataset.column_names)

    @property
    def numbered(self) -> bool:
        return self._columns().id is None

    def rows(self) -> Iterator[Row]:
        return self._rows(self.dataset, self._columns())

    def scan(self) -> Iterator[Row]:
        columns = self._columns()
        bare = self.dataset.remove_columns(picture_features(self.dataset))
        if not bare.column_names:  # a table without columns has no rows, either
            return (Row(id=f"{self.name}:{number}") for number in range(len(self.dataset)))
        return self._rows(bare, columns if columns.image in bare.column_names else replace(columns, image=None))

    def _rows(self, dataset: Any, columns: Columns) -> Iterator[Row]:
        for number, cells in enumerate(stored_rows(dataset)):
            yield row_of_cells(cells, columns, place=f"{self.name}:{number}", folder="")

    def _columns(self) -> Columns:
        return self.own.among(self.columns, self.name, picture_features(self.dataset))


def stored_rows(dataset: Any) -> Iterator[dict[str, Any]]:
    """A dataset's rows as they are stored: pictures as bytes and paths."""
    for batch in dataset.with_format("arrow").iter(batch_size=BATCH_ROWS):
        yield from batch.to_pylist()


def picture_features(dataset: Any) -> list[str]:
    """The columns that hold pictures, or lists of pictures, by their features."""
    import datasets

    lists = (datasets.List, datasets.LargeList)
    return [
        name
        for name, kind in (dataset.features or {}).items()
        if isinstance(kind.feature if isinstance(kind, lists) else kind, datasets.Image)
    ]
