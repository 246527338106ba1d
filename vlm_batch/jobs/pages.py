"""Pages of documents: those that a user chose, and those that a publisher enlarges."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from vlm_batch.inputs.images import DEFAULT_MAX_PIXELS, load_image
from vlm_batch.jobs.rows import InvalidJob, JobRow, Source
from vlm_batch.types import Request

#: A page, or a range of pages that is open at one end at most.
_SPAN = re.compile(r"(?=-?\d)(\d{1,9})?(?:(-)(\d{1,9})?)?")


@dataclass(frozen=True)
class PageRange:
    """Chosen pages, counted from 1: ``1-20,35``, ``10-`` to the end, ``-5`` from the beginning."""

    spans: tuple[tuple[int, float], ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> PageRange:
        """Parse what a user typed. Raises InvalidJob."""
        return cls(tuple(map(_span, text.split(","))), text)

    def has(self, page: int) -> bool:
        """Whether a page, counted from 1, is chosen."""
        return any(first <= page <= last for first, last in self.spans)


def _span(text: str) -> tuple[int, float]:
    """Parse one page, or a range of them."""
    match = _SPAN.fullmatch(text.replace(" ", ""))
    if match is None:
        raise InvalidJob(
            f"--pages has {text!r}; it takes pages and ranges of them, as 1-20,35"
        )
    first, dash, last = match.groups()
    begin = int(first or 1)
    end: float = begin
    if dash:
        end = int(last) if last else math.inf
    if not 1 <= begin <= end:
        raise InvalidJob(
            f"--pages has {text!r}; pages are counted from 1, and a range goes upwards"
        )
    return begin, end


@dataclass(frozen=True)
class _Around(Source):
    """A source whose rows are another's, changed."""

    inner: Source

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def columns(self) -> tuple[str, ...] | None:
        return self.inner.columns

    @property
    def numbered(self) -> bool:
        return self.inner.numbered


@dataclass(frozen=True)
class ChosenPages(_Around):
    """A document's rows of chosen pages. One that has none of them is a failed row."""

    pages: PageRange

    def rows(self) -> Iterator[JobRow]:
        num_chosen, last = 0, None
        for last in self.inner.rows():
            page = last.columns.get("page")
            if page is None or self.pages.has(page):
                num_chosen += 1
                yield last
        if last is None or num_chosen:
            return
        path, count = last.columns["path"], last.columns["pages"]
        yield JobRow(
            id=path,
            error=f"{path} has {count} pages, and none of --pages {self.pages.text}",
        )


@dataclass(frozen=True)
class Enlarging:
    """A publisher's way to show its models small pages.

    Attributes:
        below: Pages of which both sides have fewer pixels are doubled.
        bounds: Fewest and most pixels that the model sees of a page that has so many, above its processor's own.
            None leaves them to the processor.
    """

    below: int
    bounds: tuple[int, int] | None

    def __str__(self) -> str:
        said = f"doubled where both sides are below {self.below} pixels"
        if self.bounds is None:
            return said
        return f"{said}, {self.bounds[1]} pixels at most"

    def shown(self, request: Request, page: Image.Image) -> Request:
        """Return a request about its page, enlarged."""
        width, height = page.size
        if max(width, height) < self.below:
            page = page.resize((2 * width, 2 * height), Image.Resampling.LANCZOS)
        request = replace(request, images=page)
        if self.bounds is None or page.width * page.height < self.bounds[0]:
            return request
        least, most = self.bounds
        return replace(request, min_pixels=least, max_pixels=most)


@dataclass(frozen=True)
class EnlargedPages(_Around):
    """A source's pages as a publisher enlarges them. The column ``page_size`` keeps the size that they had.

    Pages of more than ``max_pixels`` are not read.
    """

    enlarging: Enlarging
    max_pixels: int | None = DEFAULT_MAX_PIXELS

    def rows(self) -> Iterator[JobRow]:
        return map(self._row, self.inner.rows())

    def _row(self, row: JobRow) -> JobRow:
        columns: dict[str, Any] = dict(row.columns)

        def shown(request: Request) -> Request:
            if not request.images:  # a video or a recording
                return request
            (picture,) = request.images
            page = load_image(picture, self.max_pixels)
            columns["page_size"] = page.size
            return self.enlarging.shown(request, page)

        return replace(row, columns=columns, shown=shown)
