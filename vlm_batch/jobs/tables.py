"""Tables of rows: JSON lines, CSV and TSV, Parquet, and directories of Hugging Face datasets."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from PIL import Image

from vlm_batch.jobs.files import is_url, is_video, prepare_for
from vlm_batch.jobs.openai import row_of_body
from vlm_batch.jobs.rows import InvalidJob, Row
from vlm_batch.types import ImageInput, Video

if TYPE_CHECKING:
    import pyarrow as pa

#: Columns that are taken for what they say, where none is named.
PICTURE_NAMES = ("image", "images", "image_path", "image_url")
FILE_NAMES = ("file_name", "filename", "path", "file", "url")
IMAGE_COLUMNS = PICTURE_NAMES + FILE_NAMES
VIDEO_COLUMNS = ("video", "videos", "video_path", "video_url")
ID_COLUMNS = ("id", "custom_id", "request_id", "key", "__key__")
#: Rows that are read at once from Parquet: pictures in cells are large.
BATCH_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of pictures, videos, ids and prompts.

    None takes the first known name that is there; ``prompt`` is read only where it is named.
    """

    image: str | None = None
    video: str | None = None
    id: str | None = None
    prompt: str | None = None

    def among(self, names: Sequence[str], table: str, pictures: Sequence[str] = ()) -> Columns:
        """The columns of a table with these names; ``pictures`` are known by their type. Raises InvalidJob."""
        for option, name in vars(self).items():
            if name is not None and name not in names:
                raise InvalidJob(f"{table} has no column {name!r} (--{option}-column); it has {', '.join(names)}")
        likely = (
            *(name for name in IMAGE_COLUMNS if name in pictures),
            *(name for name in PICTURE_NAMES if name in names),
            *pictures,
            *(name for name in FILE_NAMES if name in names),
        )
        return replace(
            self,
            image=self.image or next(iter(likely), None),
            video=self.video or next((name for name in VIDEO_COLUMNS if name in names), None),
            id=self.id or next((name for name in ID_COLUMNS if name in names), None),
        )


def row_of_cells(cells: Mapping[str, Any], columns: Columns, *, place: str, folder: str) -> Row:
    """A table's row. ``place`` stands in where it has no id, and ``folder`` is where relative paths begin."""
    row_id = place if columns.id is None or cells.get(columns.id) in (None, "") else str(cells[columns.id])
    shown = {name: value for name, value in cells.items() if name != columns.image or isinstance(value, str)}
    row = Row(id=row_id, columns=shown)
    try:
        images = () if columns.image is None else pictures_of(cells.get(columns.image), folder)
        videos = () if columns.video is None else videos_of(cells.get(columns.video), folder)
    except InvalidJob as error:
        return replace(row, error=f"{place}: {error}")
    if columns.image is not None and not images and not videos:
        return replace(row, error=f"{place}: column {columns.image!r} is empty")
    prompt = None if columns.prompt is None else cells.get(columns.prompt)
    if columns.prompt is not None and not isinstance(prompt, str):
        return replace(row, error=f"{place}: column {columns.prompt!r} holds no text")
    clips = tuple(Video(image) for image in images if isinstance(image, str) and is_video(image))
    return replace(
        row,
        images=tuple(image for image in images if not (isinstance(image, str) and is_video(image))),
        videos=clips + tuple(Video(video) for video in videos),
        prompt=prompt,
    )


def pictures_of(value: Any, folder: str) -> tuple[ImageInput, ...]:
    """The pictures of a cell: a path or URL, bytes, a mapping of either (as Hugging Face writes them), or a list of these.

    Raises InvalidJob for anything else.
    """
    if value is None or (isinstance(value, (str, bytes)) and not value):
        return ()
    if isinstance(value, float) and math.isnan(value):  # how pandas holds an empty cell
        return ()
    if isinstance(value, str):
        prepare_for(value)
        return (located(value, folder),)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return (bytes(value),)
    if isinstance(value, (Image.Image, np.ndarray, os.PathLike)):
        return (value if not isinstance(value, os.PathLike) else located(os.fspath(value), folder),)
    if isinstance(value, Mapping):
        data, path = value.get("bytes"), value.get("path") or value.get("url")
        if data is None and path is None:
            raise InvalidJob(f"a picture's mapping needs bytes, path or url; it has {', '.join(map(str, value))}")
        return pictures_of(data if data is not None else path, folder)
    if isinstance(value, (list, tuple)):
        return tuple(picture for one in value for picture in pictures_of(one, folder))
    raise InvalidJob(f"a picture is a path, URL, bytes or a list of these, not {type(value).__name__}")


def videos_of(value: Any, folder: str) -> tuple[ImageInput, ...]:
    """The videos of a cell, as ``pictures_of``."""
    return pictures_of(value, folder)


def located(path: str, folder: str) -> str:
    """A path of a table: beside the table if it is there, else from where the process runs."""
    if is_url(path) or os.path.isabs(path) or path.startswith("~") or not folder:
        return path
    beside = os.path.join(folder, path)
    return beside if os.path.exists(beside) or not os.path.exists(path) else path


# ---- JSON lines ----


@dataclass(frozen=True)
class JsonLines:
    """Requests in JSON, a line each: ``{"id", "image"/"images", "prompt"/"messages", "params", ...}`` or OpenAI's batch form.

    Any other key is a column. ``stream`` is read instead of the file, once.
    """

    path: str
    own: Columns = field(default_factory=Columns)
    stream: Iterable[str] | None = None
    columns: tuple[str, ...] | None = None
    numbered: bool = True

    @property
    def name(self) -> str:
        return self.path

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

    scan = rows

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
        given = Columns(
            image=self.own.image or next((name for name in IMAGE_COLUMNS if name in cells), None),
            video=self.own.video or next((name for name in VIDEO_COLUMNS if name in cells), None),
            id=self.own.id or next((name for name in ID_COLUMNS if name in cells), None),
        )
        for option, name in vars(self.own).items():
            if name is not None and name not in cells:
                return Row(id=place, columns=cells, error=f"{place}: there is no {name!r} (--{option}-column)")
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
            "prompt and messages exclude each other" if prompt is not None and messages is not None else None,
        )
        if wrong is not None and row.error is None:
            return replace(row, error=f"{place}: {wrong}")
        return replace(row, prompt=prompt, messages=messages, params=params)


def open_text(path: str) -> TextIO:
    """A text file, with or without a byte order mark; bytes that are no UTF-8 stay what they are. Raises InvalidJob."""
    try:
        return open(path, encoding="utf-8-sig", errors="surrogateescape", newline="")
    except OSError as error:
        raise InvalidJob(f"cannot read {path}: {error.strerror}") from error


# ---- CSV and TSV ----


@dataclass(frozen=True)
class Delimited:
    """A CSV or TSV file with a header; the separator is the one that the header has most of."""

    path: str
    own: Columns = field(default_factory=Columns)
    is_once: bool = False

    @property
    def name(self) -> str:
        return self.path

    @property
    def columns(self) -> tuple[str, ...]:
        with open_text(self.path) as file:
            return tuple(self._reader(file)[0])

    @property
    def numbered(self) -> bool:
        return self.own.among(self.columns, self.path).id is None

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

    scan = rows

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


# ---- Parquet ----


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


# ---- directories of Hugging Face datasets ----


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
