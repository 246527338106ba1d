"""A job's report as one HTML page."""

from __future__ import annotations

import base64
import bisect
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, TypeAlias

import jinja2

from vlm_batch._version import __version__
from vlm_batch.jobs.answers import listed, number_of, result_of
from vlm_batch.jobs.lines import Record
from vlm_batch.jobs.questions import Item
from vlm_batch.jobs.rows import JobRow
from vlm_batch.jobs.sources import DEFAULT_DPI, render_page
from vlm_batch.jobs.summary import MAX_FAILURES, Summary

#: A bar chart: title, (height, tooltip) of each bar, and the labels of the axis's ends.
Plot: TypeAlias = tuple[str, Sequence[tuple[float, str]], str, str]


def render(
    summary: Summary, *, model: str, prompts: Sequence[str], is_whole: bool = False
) -> str:
    """Return the page of one run, or, with ``is_whole``, of an output."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vlm_batch.jobs"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    stages = summary.mean_stages
    return environment.get_template("report.html").render(
        summary=summary,
        model=model,
        prompts=prompts,
        is_whole=is_whole,
        version=__version__,
        now=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        plots=[plot for plot in _plots(summary) if plot[1]],
        stages=stages,
        longest_stage=max([seconds for _, _, seconds in stages] + [1e-9]),
        failures_left_out=max(0, summary.failed - MAX_FAILURES),
        samples=[
            (one, None if one.jpeg is None else base64.b64encode(one.jpeg).decode())
            for one in summary.samples
        ],
    )


def summary_of(
    records: Callable[[], Iterable[Record]], dpi: int | None = None
) -> Summary:
    """Summarise an output; ``records`` is called twice."""
    ends = list(map(_times, records()))
    clock = _RunClock(filter(None, ends))
    summary = Summary(total=len(ends), keeps_samples=True, began=0.0)
    for record, end in zip(records(), ends, strict=True):
        item = _item_of(record, dpi or DEFAULT_DPI)
        at = 0.0 if end is None else clock.at(end[1])
        summary.add(item, result_of(record), at)
    return summary


def _item_of(record: Record, dpi: int) -> Item:
    row_id = str(record["id"])
    images = listed(record.get("images")) or (row_id,)
    row = _row(row_id, images, dpi)
    return Item(row_id, row, prompt=str(record.get("prompt") or ""))


def _times(record: Record) -> tuple[float, float] | None:
    """Return when a row began and ended; None if nothing says so."""
    created = number_of(record.get("created"), 0.0)
    if not created:
        return None
    seconds = result_of(record).timings.total
    return created - (0.0 if math.isnan(seconds) else seconds), created


class _RunClock:
    """Time in which runs had rows, without gaps between runs."""

    def __init__(self, times: Iterable[tuple[float, float]]) -> None:
        spans: list[list[float]] = []
        for begin, end in sorted(times):
            is_within = bool(spans) and begin <= spans[-1][1]
            if is_within:
                spans[-1][1] = max(spans[-1][1], end)
            else:
                spans.append([begin, end])
        self._ends = [end for _, end in spans]
        lengths = (end - begin for begin, end in spans)
        self._left = list(itertools.accumulate(lengths))

    def at(self, moment: float) -> float:
        span = bisect.bisect_left(self._ends, moment)
        return self._left[span] - (self._ends[span] - moment)


#: A document's page, as rows name it.
_PAGE = re.compile(r"(.+)#(\d{1,9})", re.DOTALL)


def _row(row_id: str, images: Sequence[Any], dpi: int) -> JobRow:
    """Return a row with the picture that it was about, if it is still there."""
    name = str(images[0])
    page = _PAGE.fullmatch(name)
    if page is not None and os.path.isfile(page[1]):
        load = partial(render_page, page[1], int(page[2]) - 1, dpi)
        return JobRow(id=row_id, images=tuple(images), load=load)
    is_there = os.path.isfile(name)
    return JobRow(id=row_id, images=(name,) if is_there else ())


def _plots(summary: Summary) -> Iterator[Plot]:
    buckets = summary.in_batch.filled()
    if buckets:
        seconds = []
        for least, most, count in buckets:
            seconds.append((count, f"{least:.3g} to {most:.3g} s: {count} rows"))
        ends = f"{buckets[0][0]:.2g} s", f"{buckets[-1][1]:.2g} s"
        yield "Seconds of a row in the batch", seconds, *ends
    if summary.ended <= summary.began:  # nothing says when
        return
    width, counts = summary.course.width, summary.course.counts
    rates = []
    for number, count in enumerate(counts):
        begin, rate = number * width, count / width
        rates.append((count, f"from {begin:g} s: {rate:.3g} rows/s"))
    yield "Rows that ended, over time", rates, "0 s", f"{len(counts) * width:g} s"
