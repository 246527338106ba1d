"""A job on a terminal: its progress, a line for each answer, a table, totals, and the time of each stage."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from types import TracebackType
from typing import Protocol, TextIO, runtime_checkable

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from vlm_batch.cli.console import open_console, plain_text
from vlm_batch.jobs.questions import Item
from vlm_batch.jobs.rows import Ids, Row
from vlm_batch.jobs.runner import Batcher, Counting, Job, OpenBatcher, Plan, Watch
from vlm_batch.jobs.summary import Summary
from vlm_batch.types import Request, Result

STATUS_STYLES = {"stop": "green", "length": "yellow", "cancelled": "yellow", "error": "red"}
#: Seconds between two lines of progress where there is no terminal.
PLAIN_SECONDS = 10.0
#: Most rows of the table at the end where the answers are in a file, too.
TABLE_ROWS = 200
#: Rows from which on the totals come with a histogram, where the time went and the failures by reason.
FIGURES_FROM = 12
#: Rows that a dry run shows, and most characters of their prompts.
DRY_ROWS = 8
MAX_PROMPT = 2000


class JobView(Watch):
    """Shows a job. A context manager around the work; ``show`` prints the table and the totals afterwards."""

    def __init__(
        self,
        *,
        table_to: TextIO,
        quiet: bool = False,
        says_prompt: bool = False,
        label: Callable[[Row], str] = lambda row: row.id,
        answers_in: str | None = None,
        goes_on: bool = False,
    ) -> None:
        self._quiet = quiet
        self._says_prompt = says_prompt
        self._label = label
        self._answers_in = answers_in
        self._goes_on = goes_on
        self._out = open_console(table_to)
        self._err = open_console(sys.stderr)
        self._rows: list[tuple[Item, Result]] = []
        self._summary = Summary()
        self._in_flight = 0
        self._said = 0.0
        said = TextColumn(
            "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
        )
        columns = (SpinnerColumn(), BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn(), said)
        self._bar = Progress(
            *columns, console=self._err, disable=not self._err.is_terminal, transient=True, expand=True
        )
        self._task = self._bar.add_task("loading the model", total=None)

    def __enter__(self) -> JobView:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    # ---- while it works ----

    def planned(self, plan: Plan) -> None:
        if plan.done or plan.failed_before:
            left = f", {plan.left} left" if plan.left is not None else ""
            self._err.print(f"going on: {plan.done} rows are answered, {plan.failed_before} failed before{left}")
        elif plan.others:
            said = f"none of the {_count(plan.others, 'answer')} in the output is to one of these rows"
            self._err.print(f"{said}: are paths spelled as in its first run?", soft_wrap=True)
        _print_wrong(self._err, plan)
        if plan.own and self._says_prompt:
            self._err.print(f"{_count(plan.own, 'row')} with a prompt or messages of its own: asked that, not --prompt")
        self._bar.update(self._task, total=plan.left)

    def began(self, batcher: Batcher, summary: Summary) -> None:
        self._summary = summary
        self._said = time.perf_counter()
        self._bar.update(self._task, description="answering")

    def ended(self, item: Item, result: Result, in_flight: int) -> None:
        self._in_flight = in_flight
        if self._answers_in is None or len(self._rows) <= TABLE_ROWS:
            self._rows.append((item, result))
        if not self._quiet:
            line = Text.assemble((plain_text(self._label(item.row)), "bold"), ": ", _answer(result))
            line = Text(" ").join(line.split()) if "\n" in line.plain else line
            self._err.print(
                line, no_wrap=self._err.is_terminal, overflow="ellipsis", soft_wrap=not self._err.is_terminal
            )
        self._bar.update(self._task, completed=self._summary.ended_rows, description=self.progress())
        now = time.perf_counter()
        if not self._err.is_terminal and now - self._said >= PLAIN_SECONDS:
            self._said = now
            self._err.print(f"[{self._place()}] {self.progress()}", soft_wrap=True, markup=False)

    def _place(self) -> str:
        left = None if self._summary.total is None else self._summary.total - self._summary.done_before
        return f"{self._summary.ended_rows} of {left}" if left is not None else f"{self._summary.ended_rows} done"

    def progress(self) -> str:
        """The state of the job, in one line."""
        summary = self._summary
        seconds = summary.seconds
        parts = [f"{summary.failed} failed"] if summary.failed else []
        if summary.total is not None and summary.ended_rows:  # first: a narrow terminal cuts the end off
            left = summary.total - summary.done_before - summary.failed_before - summary.ended_rows
            parts.append(f"{spell_seconds(left * seconds / summary.ended_rows)} left")
        parts.append(f"{self._in_flight} in flight")
        if summary.pictures:
            parts.append(f"{summary.pictures / seconds:.1f} pictures/s")
        parts.append(f"{summary.tokens / seconds:.0f} tokens/s")
        if summary.cached_tokens:
            parts.append(f"{summary.cached_tokens / summary.prompt_tokens:.0%} of prompts cached")
        if summary.busy_share is not None:
            parts.append(f"engine busy {summary.busy_share:.0%}")
        parts.append(spell_memory())
        return ", ".join(parts)

    # ---- at the end ----

    def show(self, summary: Summary) -> None:
        """Print the table, in the order of the rows, the totals and the figures."""
        if not summary.ended_rows and summary.done_before:
            self._out.print(f"nothing is left to ask: {_count(summary.done_before, 'row')} answered before")
        elif self._answers_in is None or len(self._rows) <= TABLE_ROWS:
            self._out.print(self._table())
        if summary.ended_rows or summary.interrupted or not summary.done_before:
            self._out.print(self._totals(summary), soft_wrap=True)
        for said in self._advice(summary):
            self._out.print(said, soft_wrap=True)
        if summary.ended_rows >= FIGURES_FROM:
            for part in (_latencies(summary), _stages(summary), _reasons(summary)):
                if part is not None:
                    self._out.print(part)
            if summary.busy_share is not None:
                self._out.print(f"the engine had work for {summary.busy_share:.0%} of the time", soft_wrap=True)
        if self._answers_in is not None:
            self._out.print(Text(plain_text(f"answers: {self._answers_in}")), soft_wrap=True)

    def _advice(self, summary: Summary) -> Iterator[str]:
        """Lines about rows that have no answer, or not a whole one, and what helps."""
        if summary.interrupted and self._goes_on:
            yield "the same command with --resume goes on from here"
        elif summary.failed and self._goes_on:
            yield f"{_count(summary.failed, 'row')} failed; --retry-errors asks them again"
        if summary.failed_before:
            yield f"{_count(summary.failed_before, 'row')} failed before; --retry-errors asks them again"
        if summary.cut:
            yield f"{_count(summary.cut, 'answer')} of the longest length: cut short, unless --max-tokens was meant so"
        if summary.again:
            yield f"{_count(summary.again, 'row')} skipped whose id had come before"

    def _table(self) -> Table:
        rows = sorted(self._rows, key=lambda row: row[0].number)
        asked_alike = len({item.prompt for item, _ in rows}) <= 1
        table = Table(
            Column("picture", overflow="fold", max_width=60),
            Column("size", no_wrap=True),
            *([] if asked_alike else [Column("question", overflow="fold")]),
            Column("answer", overflow="fold", ratio=1 if self._out.is_terminal else None),
            Column("tokens", justify="right", no_wrap=True),
            Column("seconds", justify="right", no_wrap=True),
            Column("status", no_wrap=True),
            box=box.SIMPLE_HEAD,
        )
        for item, result in rows:
            sizes = " + ".join(
                [f"{width}x{height}" for width, height in result.image_sizes]
                + [f"{frames} of {width}x{height}" for frames, width, height in result.video_sizes]
            )
            table.add_row(
                Text(plain_text(self._label(item.row))),
                sizes or "-",
                *([] if asked_alike else [Text(plain_text(item.prompt or ""))]),
                _answer(result),
                str(result.usage.completion_tokens),
                "-" if result.error is not None else f"{result.timings.total - result.timings.queue:.2f}",
                Text(result.finish_reason, style=STATUS_STYLES[result.finish_reason]),
            )
        return table

    def _totals(self, summary: Summary) -> Text:
        done, total = summary.ended_rows, summary.total
        known = f"{done} of {total - summary.done_before}" if total is not None else str(done)
        totals = Text(f"{known} requests done" if summary.interrupted else _count(done, "request"))
        totals.append(", ")
        totals.append(_count(summary.failed, "error"), style="red" if summary.failed else "green")
        rate = summary.tokens / summary.seconds
        totals.append(f", {_count(summary.tokens, 'token')} in {summary.seconds:.2f} s, {rate:.1f} tokens/s")
        if summary.interrupted:
            totals.append(" (interrupted)", style="yellow")
        return totals


def _latencies(summary: Summary) -> Table | None:
    """Seconds from reading a row to its answer's end, as bars."""
    buckets = summary.latencies.filled()
    if not buckets:
        return None
    half, most = summary.latencies.quantile(0.5), summary.latencies.quantile(0.95)
    table = Table(
        title=f"seconds a row (half under {half:.2g}, 95 % under {most:.2g})",
        title_justify="left",
        box=None,
        show_header=False,
    )
    largest = max(count for _, _, count in buckets)
    for least, high, count in buckets:
        bar = "#" * max(1 if count else 0, round(40 * count / largest))
        table.add_row(Text(f"{least:.2g} - {high:.2g}", justify="right"), bar, Text(str(count), justify="right"))
    return table


def _stages(summary: Summary) -> Table | None:
    """The mean time of a row in each stage."""
    if not summary.answered:
        return None
    table = Table(title="where a row's time goes (mean seconds)", title_justify="left", box=None, show_header=False)
    for stage, said, seconds in summary.mean_stages:
        table.add_row(stage, f"{seconds:.3f}", Text(said, style="dim"))
    return table


def _reasons(summary: Summary) -> Table | None:
    """Failures by kind."""
    if not summary.failed:
        return None
    table = Table(title="failures, by the first of each kind", title_justify="left", box=None, show_header=False)
    for reason, count in summary.reasons.most_common(8):
        table.add_row(Text(str(count), justify="right"), Text(plain_text(reason), style="red"))
    return table


# ---- a dry run ----


@runtime_checkable
class Renders(Protocol):
    """A batcher that shows what its model's chat template makes of a request."""

    def rendered(self, request: Request) -> str | None: ...


def show_dry_run(job: Job, open_batcher: OpenBatcher, out: TextIO, *, rows: int | None, cache_bytes: int) -> int:
    """Ask the first rows without keeping their answers; show prompts, sizes and tokens, and what all would take.

    ``rows`` are as many as are in the batch together, None where their number is found; ``cache_bytes`` what the batcher keeps
    at most for later ones.
    """
    console = open_console(out)
    plan = job.plan(Ids(), Ids())
    _print_wrong(console, plan)
    num_asked = max(DRY_ROWS, rows or 0)
    items = [item for item in islice(job.items(), 4 * num_asked) if item.error is None][:num_asked]
    asked = {item.id: item for item in items}
    if not items:
        console.print("no row among the first can be asked")
        return 1
    with open_batcher() as batcher:
        began = time.perf_counter()
        results = list(batcher.as_completed([item.request() for item in items]))
        seconds = time.perf_counter() - began
        results.sort(key=lambda result: asked[result.request_id].number)
        for result in results[:DRY_ROWS]:
            _show_asked(console, asked[result.request_id], result, batcher)
        kept = batcher.stats().cache_bytes if isinstance(batcher, Counting) else cache_bytes
    each = seconds / len(items)
    if plan.total is None:
        console.print(f"{each:.2f} s a row; standard input does not say how many rows there are")
    else:
        askable = plan.total - plan.wrong.counts.total()
        console.print(
            f"{_count(askable, 'row')}, about {spell_seconds(askable * each)} at {each:.2f} s a row "
            f"(measured on {len(items)}, the model's first steps among them)",
            soft_wrap=True,
        )
    more = max(0, cache_bytes - kept) / 1e9
    console.print(
        f"memory: {spell_memory()} so far; with what is kept for later rows at its most (--cache-bytes), {more:.1f} GB more",
        soft_wrap=True,
    )
    return 0 if all(result.ok for result in results) else 1


def _show_asked(console: Console, item: Item, result: Result, batcher: object) -> None:
    console.print(Text(plain_text(item.id), style="bold"), soft_wrap=True)
    rendered = None
    if isinstance(batcher, Renders):
        with contextlib.suppress(Exception):  # what is wrong with it, its result says
            rendered = batcher.rendered(item.request())
    if rendered is not None:
        lines = rendered[:MAX_PROMPT].rstrip("\n").split("\n")
        lines += [f"... and {len(rendered) - MAX_PROMPT:,} characters more"] if len(rendered) > MAX_PROMPT else []
    else:
        lines = [
            f"{one['role']}: {one['content']}" for one in item.messages or ({"role": "user", "content": item.prompt},)
        ]
    for line in lines:
        console.print(Text(plain_text(f"  | {line}")), soft_wrap=True)
    sizes = [f"{width}x{height}" for width, height in result.image_sizes]
    sizes += [f"{frames} frames of {width}x{height}" for frames, width, height in result.video_sizes]
    sizes += [f"processed to {width}x{height}" for width, height in result.model_image_sizes]
    usage = result.usage
    tokens = f"{usage.prompt_tokens} prompt tokens, {usage.image_tokens} of them pictures; {usage.completion_tokens} answered"
    console.print(Text("  " + "; ".join([*sizes, tokens]), style="dim"), soft_wrap=True)
    console.print(Text("  ").append_text(_answer(result)), soft_wrap=True)


def _print_wrong(console: Console, plan: Plan) -> None:
    """Rows that can be seen to fail, by kind."""
    for message, count in plan.wrong.most_common(8):
        said = f"{_count(count, 'row')} cannot be asked{', the first' if count > 1 else ''}: {message}"
        console.print(Text(plain_text(said)), soft_wrap=True)


# ---- words ----


def spell_memory() -> str:
    """The most memory that this process has held at once, and on a GPU what MLX has held there."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    said = f"{peak / 1e9:.1f} GB"
    if "mlx.core" in sys.modules:  # loaded with the model; not loaded here for the sake of a figure
        mx = sys.modules["mlx.core"]
        if mx.default_device() == mx.Device(mx.gpu):
            from vlm_batch.runtime.memory import peak_bytes

            said += f" ({peak_bytes() / 1e9:.1f} GB by MLX)"
    return said


def spell_seconds(seconds: float) -> str:
    """A duration to two digits or so."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _answer(result: Result) -> Text:
    if result.error is not None:
        return Text(plain_text(result.error), style="red")
    return Text(plain_text(result.text)) if result.text else Text("(empty)", style="dim")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
