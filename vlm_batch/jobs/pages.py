"""Pages of documents that a user chose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from vlm_batch.jobs.rows import InvalidJob, JobRow, Source

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
        return any(
            first <= page and (last is None or page <= last)
            for first, last in self.spans
        )


def _span(text: str) -> tuple[int, int | None]:
    match = _SPAN.fullmatch(text.replace(" ", ""))
    if match is None or not (match[1] or match[3]):
        raise InvalidJob(
            f"--pages has {text!r}; it takes pages and ranges of them, as 1-20,35"
        )
    first = int(match[1] or 1)
    last: int | None = first
    if match[2]:
        last = int(match[3]) if match[3] else None
    is_upwards = last is None or first <= last
    if first < 1 or not is_upwards:
        raise InvalidJob(
            f"--pages has {text!r}; pages are counted from 1, and a range goes upwards"
        )
    return first, last


@dataclass(frozen=True)
class ChosenPages(Source):
    """A document's rows of chosen pages. One that has none of them is a failed row."""

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

    def rows(self) -> Iterator[JobRow]:
        has_any, last = False, None
        for row in self.inner.rows():
            page = row.columns.get("page")
            if page is None or self.pages.has(page):
                has_any = True
                yield row
            last = row
        if last is not None and not has_any:
            path, count = last.columns["path"], last.columns["pages"]
            yield JobRow(
                id=path,
                error=f"{path} has {count} pages, and none of --pages {self.pages.text}",
            )
