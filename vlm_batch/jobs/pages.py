"""Pages of documents: pictures that have several, and those that a user chose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from PIL import Image, ImageSequence

from vlm_batch.errors import InvalidImage
from vlm_batch.inputs.images import DEFAULT_MAX_PIXELS
from vlm_batch.jobs.rows import InvalidJob, Row, Source, SourceFile
from vlm_batch.jobs.sources import FILE_COLUMNS, file_columns
from vlm_batch.types import ImageInput

TIFF_SUFFIXES = (".tif", ".tiff")
_SPAN = re.compile(r"(\d+)?(-)?(\d+)?")


@dataclass(frozen=True)
class PageRange:
    """Chosen pages, counted from 1: ``1-20,35``, ``10-`` to the end, ``-5`` from the beginning."""

    spans: tuple[tuple[int, int | None], ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> PageRange:
        """Parse what a user typed. Raises InvalidJob."""
        return cls(tuple(map(_span, text.split(","))), text)

    def has(self, page: int) -> bool:
        return any(first <= page and (last is None or page <= last) for first, last in self.spans)


def _span(text: str) -> tuple[int, int | None]:
    match = _SPAN.fullmatch(text.replace(" ", ""))
    if match is None or not (match[1] or match[3]):
        raise InvalidJob(f"--pages has {text!r}; it takes pages and ranges of them, as 1-20,35")
    first = int(match[1] or 1)
    if not match[2]:
        last: int | None = first
    else:
        last = int(match[3]) if match[3] else None
    if first < 1 or (last is not None and last < first):
        raise InvalidJob(f"--pages has {text!r}; pages are counted from 1, and a range goes upwards")
    return first, last


@dataclass(frozen=True)
class ChosenPages(Source):
    """A source's rows of chosen pages. A document that has none of them is a failed row."""

    inner: Source
    pages: PageRange

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def columns(self) -> tuple[str, ...] | None:
        return self.inner.columns

    @property
    def numbered(self) -> bool:
        return self.inner.numbered

    def rows(self) -> Iterator[Row]:
        has_any, last = False, None
        for row in self.inner.rows():
            page = row.columns.get("page")
            if page is None or self.pages.has(page):
                has_any = True
                yield row
            last = row
        if last is not None and not has_any:
            count = last.columns["pages"]
            yield Row(id=self.name, error=f"{self.name} has {count} pages, and none of --pages {self.pages.text}")


@dataclass(frozen=True)
class TiffPages(SourceFile):
    """The pages of a TIFF file, read on demand, with ids ``file.tif#1``, ..."""

    columns = (*FILE_COLUMNS, "page", "pages")
    numbered = True

    def rows(self) -> Iterator[Row]:
        try:
            count = num_frames(self.path)
        except Exception as error:  # damaged, missing: Pillow has errors of many kinds
            yield Row(id=self.path, error=f"{self.path} cannot be read as a picture: {error}")
            return
        for number in range(count):
            page = f"{self.path}#{number + 1}"
            columns = {**file_columns(self.path), "page": number + 1, "pages": count}
            yield Row(id=page, images=(page,), columns=columns, load=partial(read_frame, self.path, number))


def num_frames(path: str) -> int:
    with Image.open(path) as picture:
        return sum(1 for _ in ImageSequence.Iterator(picture))


def read_frame(path: str, number: int) -> tuple[ImageInput, ...]:
    """Read one page of a picture file. Raises InvalidImage."""
    try:
        with Image.open(path) as picture:
            picture.seek(number)
            width, height = picture.size
            if width * height > DEFAULT_MAX_PIXELS:
                raise InvalidImage(f"it has {width} x {height} pixels; at most {DEFAULT_MAX_PIXELS:,} are read")
            return (picture.convert("RGB"),)
    except Exception as error:
        raise InvalidImage(f"{path}#{number + 1} cannot be read: {error}") from error
