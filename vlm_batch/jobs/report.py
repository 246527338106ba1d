"""A job's report: one HTML page that needs nothing else, with plots, failures and a sample of answers."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import TypeAlias

import jinja2

from vlm_batch._version import __version__
from vlm_batch.jobs.summary import MAX_FAILURES, Summary

#: Bars over an axis: a title, (height, what it says when it is pointed at), and a label for either end.
Plot: TypeAlias = tuple[str, Sequence[tuple[float, str]], str, str]


def render(summary: Summary, *, model: str, prompts: Sequence[str]) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vlm_batch.jobs"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    stages = summary.mean_stages
    return environment.get_template("report.html").render(
        summary=summary,
        model=model,
        prompts=prompts,
        version=__version__,
        now=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        plots=[plot for plot in _plots(summary) if plot[1]],
        stages=stages,
        longest_stage=max([seconds for _, _, seconds in stages] + [1e-9]),
        failures_left_out=max(0, summary.failed - MAX_FAILURES),
        samples=[(one, None if one.jpeg is None else base64.b64encode(one.jpeg).decode()) for one in summary.samples],
    )


def _plots(summary: Summary) -> Iterator[Plot]:
    buckets = summary.latencies.filled()
    seconds = [(count, f"{least:.3g} to {most:.3g} s: {count} rows") for least, most, count in buckets]
    ends = (f"{buckets[0][0]:.2g} s", f"{buckets[-1][1]:.2g} s") if buckets else ("", "")
    yield "Seconds a row, from being read to its end", seconds, *ends
    width, counts = summary.course.width, summary.course.counts
    rates = [(count, f"from {number * width:g} s: {count / width:.3g} rows/s") for number, count in enumerate(counts)]
    yield "Rows that ended, over time", rates, "0 s", f"{len(counts) * width:g} s"
