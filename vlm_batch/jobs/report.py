"""A job's report: one HTML page that needs nothing else, with plots, failures and a sample of answers."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import jinja2

from vlm_batch._version import __version__
from vlm_batch.jobs.summary import MAX_FAILURES, STAGES, Summary

PLOT_WIDTH, PLOT_HEIGHT, PLOT_MARGIN = 640, 160, 24


@dataclass(frozen=True)
class Bar:
    """A bar of a plot, in its pixels, and what it says when it is pointed at."""

    x: float
    y: float
    width: float
    height: float
    said: str


@dataclass(frozen=True)
class Plot:
    """Bars over an axis with a label at either end."""

    title: str
    bars: tuple[Bar, ...]
    first: str
    last: str


def render(summary: Summary, *, model: str, prompts: Sequence[str]) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vlm_batch.jobs"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    stages = [(name, said, summary.stages[name] / max(1, summary.answered)) for name, said in STAGES.items()]
    stages.append(
        ("source", "rows and pages of the source, one at a time", summary.source / max(1, summary.ended_rows))
    )
    return environment.get_template("report.html").render(
        summary=summary,
        model=model,
        prompts=prompts,
        version=__version__,
        now=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        plots=[plot for plot in (_latency_plot(summary), _course_plot(summary)) if plot.bars],
        plot_size=(PLOT_WIDTH, PLOT_HEIGHT, PLOT_MARGIN),
        stages=stages,
        longest_stage=max([seconds for _, _, seconds in stages] + [1e-9]),
        failures_left_out=max(0, summary.failed - MAX_FAILURES),
        samples=[(one, None if one.jpeg is None else base64.b64encode(one.jpeg).decode()) for one in summary.samples],
    )


def _latency_plot(summary: Summary) -> Plot:
    buckets = summary.latencies.filled()
    said = [f"{least:.3g} to {most:.3g} s: {count} rows" for least, most, count in buckets]
    ends = (f"{buckets[0][0]:.2g} s", f"{buckets[-1][1]:.2g} s") if buckets else ("", "")
    return Plot("Seconds a row, from being read to its end", _bars([count for *_, count in buckets], said), *ends)


def _course_plot(summary: Summary) -> Plot:
    width, counts = summary.course.width, summary.course.counts
    said = [f"from {number * width:g} s: {count / width:.3g} rows/s" for number, count in enumerate(counts)]
    return Plot("Rows that ended, over time", _bars(counts, said), "0 s", f"{len(counts) * width:g} s")


def _bars(counts: Sequence[int], said: Sequence[str]) -> tuple[Bar, ...]:
    if not counts:
        return ()
    room = PLOT_HEIGHT - PLOT_MARGIN
    width, largest = PLOT_WIDTH / len(counts), max([*counts, 1])
    return tuple(
        Bar(number * width + 0.5, room - room * count / largest, max(0.5, width - 1), room * count / largest, text)
        for number, (count, text) in enumerate(zip(counts, said, strict=True))
    )
