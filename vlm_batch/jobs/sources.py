"""Sources that arguments name."""

from __future__ import annotations

import itertools
import operator
import os
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from vlm_batch.assets import AUDIO_SUFFIXES, VIDEO_SUFFIXES
from vlm_batch.checks import parse_json
from vlm_batch.errors import InvalidImage
from vlm_batch.inputs.documents import (
    DEFAULT_DPI,
    NEEDS_PDFIUM,
    TIFF_SUFFIXES,
    count_pages,
    has_pdfium,
    load_page,
)
from vlm_batch.inputs.fetch import is_address
from vlm_batch.inputs.images import picture_suffixes
from vlm_batch.jobs.arrow import HuggingFace, Parquet, datasets_in, is_dataset
from vlm_batch.jobs.cells import Columns
from vlm_batch.jobs.files import (
    Found,
    check_there,
    expanded,
    kind_of,
    without_query,
)
from vlm_batch.jobs.rows import InvalidJob, JobRow, Source, SourceFile, name_of
from vlm_batch.jobs.tables import Delimited, JsonLines
from vlm_batch.types import Audio, ImageInput, Video

LINES = (".jsonl", ".ndjson")
DELIMITED = (".csv", ".tsv")
PARQUET = (".parquet", ".pq")
PDF = (".pdf",)
TAR = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
#: Tables, by their suffixes.
_TABLES: tuple[tuple[tuple[str, ...], Callable[[str, Columns], Source]], ...] = (
    (LINES, JsonLines),
    (DELIMITED, Delimited),
    (PARQUET, Parquet),
    (TAR, lambda path, columns: Tar(path)),
)
#: Columns of files, which prompts may name.
FILE_COLUMNS = ("path", "name", "stem", "folder")
#: Largest archive member that is read as text.
MAX_TEXT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Reading options.

    Attributes:
        columns: Columns of tables.
        recursive: Search folders within folders.
        videos: Find videos in folders; ``audios`` and ``pdfs`` likewise.
        fps: Sampled video frames a second; ``max_frames`` bounds them.
        dpi: Resolution of PDF pages.
        split: Split of a dataset; all by default.
        own_prompts: Use tables' column "prompt".
    """

    columns: Columns = field(default_factory=Columns)
    recursive: bool = True
    videos: bool = False
    audios: bool = False
    pdfs: bool = False
    fps: float | None = None
    max_frames: int | None = None
    dpi: int = DEFAULT_DPI
    split: str | None = None
    own_prompts: bool = True

    @property
    def suffixes(self) -> frozenset[str]:
        further = (
            VIDEO_SUFFIXES * self.videos,
            AUDIO_SUFFIXES * self.audios,
            PDF * self.pdfs,
        )
        return picture_suffixes().union(*further)


#: Tables' usual columns, and pictures alone.
_USUAL = Reading()


def open_sources(
    arguments: Sequence[str], reading: Reading = _USUAL
) -> tuple[list[Source], Found]:
    """Open the arguments' sources, in order; ``-`` is standard input. Missing files become failed rows.

    Returns:
        The sources, and folders' found and skipped files.

    Raises:
        InvalidJob: A table, folder or pattern is unreadable, or nothing was found.
    """
    check_there(arguments)
    sources: list[Source] = []
    files: list[str] = []  # since the last table
    found = Found()
    for path in itertools.chain.from_iterable(map(expanded, arguments)):
        opened = _table(path, reading)
        if opened is None:
            files += found.look_for(
                path, suffixes=reading.suffixes, recursive=reading.recursive
            )
        elif path == "-" or found.add(path):
            # a table in two spellings is one table
            sources += [*_of_files(files, reading), *opened]
            files = []
    sources += _of_files(files, reading)
    if not sources:
        raise _nothing_found(arguments, reading, found)
    if reading.own_prompts:
        sources = list(map(_with_own_prompts, sources))
    return sources, found


def _nothing_found(
    arguments: Sequence[str], reading: Reading, found: Found
) -> InvalidJob:
    looked = f"looked for files that end in {' '.join(sorted(reading.suffixes))}"
    said = "; ".join(filter(None, (found.said(), looked)))
    return InvalidJob(f"no picture in {', '.join(arguments)} ({said})")


def _with_own_prompts(source: Source) -> Source:
    """Return a table that asks its column "prompt", if it has one and nobody named another."""
    if not isinstance(source, (Delimited, Parquet, HuggingFace)):
        return source
    if source.own.prompt is not None or "prompt" not in source.columns:
        return source
    return replace(source, own=replace(source.own, prompt="prompt"))


def _table(path: str, reading: Reading) -> list[Source] | None:
    """Return sources of a table, archive or dataset; None for other files."""
    if path == "-":
        return [read_standard_input(reading)]
    if is_address(path):
        return None
    columns, name = reading.columns, path.lower()
    if os.path.isdir(path):
        if not is_dataset(path):
            return None
        return list(datasets_in(path, columns, reading.split))
    for suffixes, kind in _TABLES:
        if name.endswith(suffixes):
            return [kind(_there(path), columns)]
    return None


def _there(path: str) -> str:
    """Return a file that can be read. Raises InvalidJob."""
    file = os.path.expanduser(path)
    if os.access(file, os.R_OK):
        return file
    if os.path.exists(file):
        raise InvalidJob(f"{path} cannot be read")
    raise InvalidJob(f"{path} does not exist")


def _is_local_pdf(path: str) -> bool:
    return path.lower().endswith(PDF) and not is_address(path)


def _of_files(paths: Sequence[str], reading: Reading) -> Iterator[Source]:
    for is_pdf, run in itertools.groupby(paths, _is_local_pdf):
        if is_pdf:
            yield from map(partial(Pdf, dpi=reading.dpi), run)
        else:
            yield Files(tuple(run), reading.fps, reading.max_frames)


@dataclass(frozen=True)
class Files(Source):
    """Media files and URLs; paths are ids."""

    paths: tuple[str, ...]
    fps: float | None = None
    max_frames: int | None = None
    name = "files"
    columns = FILE_COLUMNS

    def rows(self) -> Iterator[JobRow]:
        for path in self.paths:
            num_pages = _count_tiff_pages(path)
            if num_pages > 1:
                yield from _pages(path, num_pages)
            else:
                yield self._row(path)

    def _row(self, path: str) -> JobRow:
        columns = file_columns(path)
        kind = kind_of(path)
        if kind == "video":
            clip = Video(path, fps=self.fps, max_frames=self.max_frames)
            return JobRow(id=path, videos=(clip,), columns=columns)
        if kind == "audio":
            return JobRow(id=path, audios=(Audio(path),), columns=columns)
        return JobRow(id=name_of(path), images=(path,), columns=columns)


def _count_tiff_pages(path: str) -> int:
    is_tiff = path.lower().endswith(TIFF_SUFFIXES)
    if not is_tiff or not os.path.isfile(path):  # no URL, and no pipe to wait at
        return 1
    try:
        return count_pages(path)
    except InvalidImage:  # whoever decodes it will say what is wrong
        return 1


def read_standard_input(reading: Reading) -> Source:
    """Read JSON requests, or paths and URLs."""
    lines = filter(str.strip, sys.stdin)
    first = next(lines, None)
    if first is None:
        raise InvalidJob(
            "standard input is empty; send paths, URLs or JSON lines: ls photos/*.jpg | vlm-batch run -"
        )
    whole = itertools.chain([first], lines)
    if first.lstrip().startswith("{"):
        return JsonLines("-", reading.columns, stream=whole)
    return Paths(whole, reading)


@dataclass(frozen=True)
class Paths(Source):
    stream: Iterable[str]
    reading: Reading
    name = "-"
    columns = FILE_COLUMNS
    is_once = True

    def rows(self) -> Iterator[JobRow]:
        for line in self.stream:
            for source in _of_files([line.rstrip("\r\n")], self.reading):
                yield from source.rows()


@dataclass(frozen=True)
class Pdf(SourceFile):
    """A PDF's pages, rendered on demand, with ids ``file.pdf#1``, ...

    ``longest`` is the number of pixels of a page's longest side, whatever its size; None leaves it to ``dpi``.
    """

    dpi: int = DEFAULT_DPI
    longest: int | None = None
    columns = (*FILE_COLUMNS, "page", "pages")
    numbered = True

    def rows(self) -> Iterator[JobRow]:
        if not has_pdfium():
            raise InvalidJob(NEEDS_PDFIUM)
        try:
            count = count_pages(self.path)
        except InvalidImage as error:
            yield JobRow(id=self.path, error=str(error))
            return
        yield from _pages(self.path, count, self.dpi, self.longest)


def _pages(
    path: str, count: int, dpi: int = DEFAULT_DPI, longest: int | None = None
) -> Iterator[JobRow]:
    for number in range(count):
        page = f"{path}#{number + 1}"
        columns = {**file_columns(path), "page": number + 1, "pages": count}
        load = partial(render_page, path, number, dpi, longest)
        yield JobRow(id=page, images=(page,), columns=columns, load=load)


def file_columns(path: str) -> Mapping[str, Any]:
    """Return what prompts may name of a file."""
    name = os.path.basename(without_query(path))
    return {
        "path": path,
        "name": name,
        "stem": Path(name).stem,
        "folder": os.path.dirname(path),
    }


def render_page(
    path: str, number: int, dpi: int, longest: int | None = None
) -> tuple[ImageInput, ...]:
    return (load_page(path, number, dpi, longest),)


@dataclass(frozen=True)
class Tar(SourceFile):
    """A WebDataset archive: members with equal names up to the first dot are a row."""

    def rows(self) -> Iterator[JobRow]:
        return self._rows(with_pictures=True)

    def scan(self) -> Iterator[JobRow]:
        return self._rows(with_pictures=False)

    def _rows(self, *, with_pictures: bool) -> Iterator[JobRow]:
        after = ""
        try:
            with tarfile.open(self.path) as archive:
                grouped = itertools.groupby(_members(archive), operator.itemgetter(0))
                for key, parts in grouped:
                    after = f" after {key}"
                    members: dict[str, bytes] = {}
                    for _, suffix, member in parts:
                        members[suffix] = b""
                        if _is_wanted(member, suffix, with_pictures):
                            members[suffix] = self._data(archive, member)
                    yield self._row(key, members)
                _check_end(archive)
        except (tarfile.TarError, OSError, EOFError) as error:
            yield JobRow(
                id=f"{self.path}:damaged",
                error=f"{self.path} is damaged{after}: {error}",
            )

    @staticmethod
    def _data(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
        file = archive.extractfile(member)
        data = file.read() if file is not None else b""
        if len(data) != member.size:
            raise tarfile.ReadError(f"{member.name} is cut off")
        return data

    def _row(self, key: str, members: dict[str, bytes]) -> JobRow:
        row_id = f"{self.path}/{key}"
        columns: dict[str, Any] = {"__key__": key}
        names, images = list[str](), list[bytes]()
        for suffix, data in members.items():
            if _is_picture(suffix):
                names.append(f"{row_id}.{suffix}")
                images.append(data)
                continue
            try:
                columns.update(_columns_of(suffix, data))
            except ValueError as error:
                return JobRow(id=row_id, error=f"{row_id}.json is not JSON: {error}")
        if not images:
            return JobRow(
                id=row_id,
                columns=columns,
                error=f"{row_id} has no picture, only {', '.join(members)}",
            )
        load: Callable[[], tuple[bytes, ...]] = partial(tuple, images)
        return JobRow(id=row_id, images=tuple(names), columns=columns, load=load)


def _members(
    archive: tarfile.TarFile,
) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yield the members that are parts of rows, each with its row's key and its suffix."""
    for member in archive:
        archive.members = []  # type: ignore[attr-defined]  # tarfile keeps every member that it has seen
        key, suffix = _key_of(member)
        if key is not None:
            yield key, suffix, member


def _columns_of(suffix: str, data: bytes) -> Mapping[str, Any]:
    """Return the columns that a member gives its row: a JSON object's keys, or its text. Raises ValueError."""
    if suffix == "json":
        cells = parse_json(data)
        if isinstance(cells, dict):
            return cells
        return {"json": cells}
    try:
        return {suffix: data.decode()}
    except UnicodeDecodeError:
        return {}


def _key_of(member: tarfile.TarInfo) -> tuple[str | None, str]:
    """Return the key of a member's row, and its suffix in lower case; None for what is no part of a row."""
    folder, _, name = member.name.rpartition("/")
    stem, dot, suffix = name.partition(".")
    has_key = bool(stem and dot)
    if not member.isfile() or not has_key:
        return None, ""
    key = f"{folder}/{stem}" if folder else stem
    return key, suffix.lower()


def _is_wanted(member: tarfile.TarInfo, suffix: str, with_pictures: bool) -> bool:
    if _is_picture(suffix):
        return with_pictures
    return suffix == "json" or member.size <= MAX_TEXT_BYTES


def _check_end(archive: tarfile.TarFile) -> None:
    """Raise ReadError for an archive that is cut between its members, of which tarfile says nothing."""
    file = archive.fileobj
    if file is None or file.tell() < archive.offset + tarfile.BLOCKSIZE:
        raise tarfile.ReadError("it ends without the mark of its end")


def _is_picture(suffix: str) -> bool:
    return f".{suffix.rpartition('.')[2]}" in picture_suffixes()
