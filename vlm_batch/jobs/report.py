"""A job's report as one HTML page."""

from __future__ import annotations

import base64
import bisect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, TypeAlias

import jinja2

from vlm_batch._version import __version__
from vlm_batch.jobs.answers import result_of
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
    ends = [_times(record) for record in records()]
    clock = _RunClock(end for end in ends if end is not None)
    summary = Summary(total=len(ends), keeps_samples=True, began=0.0)
    for record, end in zip(records(), ends, strict=True):
        images = tuple(record.get("images") or (record["id"],))
        item = Item(
            str(record["id"]),
            _row(str(record["id"]), images, dpi or DEFAULT_DPI),
            prompt=record.get("prompt"),
        )
        summary.add(item, result_of(record), 0.0 if end is None else clock.at(end[1]))
    return summary


def _times(record: Record) -> tuple[float, float] | None:
    created = record.get("created")
    seconds = result_of(record).timings.total
    return (
        (float(created) - (seconds if seconds == seconds else 0.0), float(created))
        if created
        else None
    )


class _RunClock:
    """Time in which runs had rows, without gaps between runs."""

    def __init__(self, times: Iterable[tuple[float, float]]) -> None:
        spans: list[list[float]] = []
        for begin, end in sorted(times):
            if spans and begin <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], end)
            else:
                spans.append([begin, end])
        self._ends = [end for _, end in spans]
        self._left = list(itertools.accumulate(end - begin for begin, end in spans))

    def at(self, moment: float) -> float:
        span = bisect.bisect_left(self._ends, moment)
        return self._left[span] - (self._ends[span] - moment)


def _row(row_id: str, images: Sequence[Any], dpi: int) -> JobRow:
    name = str(images[0])
    path, mark, page = name.rpartition("#")
    if mark and page.isdigit() and os.path.isfile(path):
        return JobRow(
            id=row_id,
            images=tuple(images),
            load=partial(render_page, path, int(page) - 1, dpi),
        )
    return JobRow(id=row_id, images=(name,) if os.path.isfile(name) else ())


def _plots(summary: Summary) -> Iterator[Plot]:
    buckets = summary.in_batch.filled()
    seconds = [
        (count, f"{least:.3g} to {most:.3g} s: {count} rows")
        for least, most, count in buckets
    ]
    ends = (
        (f"{buckets[0][0]:.2g} s", f"{buckets[-1][1]:.2g} s") if buckets else ("", "")
    )
    yield "Seconds of a row in the batch", seconds, *ends
    if summary.ended <= summary.began:  # nothing says when
        return
    width, counts = summary.course.width, summary.course.counts
    rates = [
        (count, f"from {number * width:g} s: {count / width:.3g} rows/s")
        for number, count in enumerate(counts)
    ]
    yield "Rows that ended, over time", rates, "0 s", f"{len(counts) * width:g} s"
