"""A job on a terminal: progress, answers, a table, totals and stages."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TextIO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TimeElapsedColumn,
)
from rich.table import Column, Table
from rich.text import Text

from vlm_batch.cli.console import brief, open_console, plain_text
from vlm_batch.jobs.plan import Plan
from vlm_batch.jobs.questions import Item
from vlm_batch.jobs.rows import JobRow, count_of
from vlm_batch.jobs.runner import Batcher, Watch
from vlm_batch.jobs.summary import Summary
from vlm_batch.types import Result

STATUS_STYLES = {
    "stop": "green",
    "length": "yellow",
    "cancelled": "yellow",
    "error": "red",
}
#: Seconds between progress lines without a terminal.
PLAIN_SECONDS = 60.0
#: Most rows with a line for each answer, and of the table at the end if a file has the answers.
SHOWN_ROWS = 100
#: How far an estimate moves in a share of the time that a job has run.
MOVED = 2.0
#: Rows from which totals include a histogram, stages and failures.
FIGURES_FROM = 12
#: Most characters shown of a name, of a question, and of an answer that a file has or of an error.
MAX_NAME, MAX_QUESTION, MAX_ANSWER = 200, 400, 4000


class _Parts:
    """As many parts of a line as there is room for; only the first may be cut."""

    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = parts

    def __rich_measure__(
        self, console: Console, options: ConsoleOptions
    ) -> Measurement:
        return Measurement(1, options.max_width)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        said = self._parts[0]
        for part in self._parts[1:]:
            longer = f"{said}, {part}"
            if len(longer) > options.max_width:
                break
            said = longer
        yield Text(said, no_wrap=True, overflow="ellipsis")


class _PartsColumn(ProgressColumn):
    """Shows what ``parts`` returns, anew at each refresh."""

    def __init__(self, parts: Callable[[], Sequence[str]]) -> None:
        super().__init__(Column(ratio=1, no_wrap=True))
        self._parts = parts

    def render(self, task: Task) -> _Parts:  # type: ignore[override]
        return _Parts(self._parts())


class Remaining:
    """Estimates the seconds that a job has left.

    Short answers end first, so there is no estimate before as many rows have ended as are under way. Rows end in
    bursts, so what one says counts by the time until the next.
    """

    def __init__(self) -> None:
        self._end: float | None = None
        self._latest = self._at = 0.0

    def update(self, summary: Summary, in_flight: int) -> None:
        """Count a row that has ended."""
        ended, asked = summary.ended_rows, summary.asked_rows
        if asked is None or ended < in_flight:
            return
        now = summary.seconds
        latest = now * asked / ended
        self._end = latest if self._end is None else self._moved(self._end, now)
        self._latest, self._at = latest, now

    def _moved(self, end: float, now: float) -> float:
        share = min(1.0, MOVED * (now - self._at) / now)
        return end + share * (self._latest - end)

    def seconds(self, summary: Summary, now: float) -> float | None:
        """Return the seconds left ``now`` seconds after the beginning; None if nobody knows."""
        asked = summary.asked_rows
        if self._end is None or not asked:
            return None
        # a row that takes longer than all before is waited for
        least = now * (asked - summary.ended_rows) / asked
        return max(least, self._moved(self._end, now) - now)


class JobView(Watch):
    """Shows a job; a context manager around the work, then ``show``.

    Args:
        only_here: Nothing else has the answers, so a table shows them, however many there are.
        goes_on: ``--resume`` can go on from what was written.
    """

    def __init__(
        self,
        *,
        table_to: TextIO,
        quiet: bool = False,
        verbose: bool = False,
        says_prompt: bool = False,
        label: Callable[[JobRow], str] = lambda row: row.id,
        answers_in: str | None = None,
        only_here: bool = False,
        goes_on: bool = False,
    ) -> None:
        self._quiet = quiet
        self._verbose = verbose
        self._left: int | None = None
        self._has_begun = False
        self._shown = 0
        self._num_kinds = 0
        self._says_prompt = says_prompt
        self._label = label
        self._answers_in = answers_in
        self._only_here = only_here
        self._goes_on = goes_on
        # the bar puts others in their place
        self._stdout, self._stderr = table_to, sys.stderr
        self._out, self._err = open_console(table_to), open_console(sys.stderr)
        self._rows: list[tuple[Item, Result]] = []
        self._summary = Summary()
        self._in_flight = 0
        self._is_over = threading.Event()
        self._plain = threading.Thread(target=self._say_plainly, daemon=True)
        columns = (
            SpinnerColumn(),
            BarColumn(16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _PartsColumn(self.parts),
        )
        self._bar = Progress(
            *columns,
            console=self._err,
            disable=not self._err.is_terminal,
            transient=True,
            expand=True,
        )
        self._remaining = Remaining()
        self._stage = "reading the rows"
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> JobView:
        self._bar.start()
        self._plain.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._bar.stop()
        self._plain.join()

    def leave_terminal(self) -> None:
        """Continue plainly after a hang-up. Never waits, so signal handlers may call it."""
        self._bar.console.file = open(os.devnull, "w")  # noqa: SIM115  (the bar's own thread writes to it until the end)
        self._err, self._out = open_console(self._stderr), open_console(self._stdout)

    # ---- while it works ----

    def counted(self, rows: int) -> None:
        self._stage = f"reading the rows: {rows:,}"

    def planned(self, plan: Plan) -> None:
        if plan.num_before:
            left = f", {plan.left} left" if plan.left is not None else ""
            self._err.print(
                f"going on: {plan.done} rows are answered, {plan.failed_before} failed before{left}"
            )
        if plan.unknown:
            said = f"of {count_of(plan.unknown, 'answered row')} it is not known what was asked (nothing says it any more)"
            self._err.print(
                f"{said}: changed prompts, params and files of rows are not seen",
                soft_wrap=True,
            )
        if plan.others and not plan.num_before:
            said = f"none of the {count_of(plan.others, 'answer')} in the output is to one of these rows"
            self._err.print(
                f"{said}: are paths spelled as in its first run?", soft_wrap=True
            )
        print_wrong(self._err, plan)
        if plan.own and self._says_prompt:
            self._err.print(
                f"{count_of(plan.own, 'row')} with a prompt or messages of its own: asked that, not --prompt"
            )
        self._left = plan.left
        if plan.left is not None and plan.left > SHOWN_ROWS:
            self._say_how_long(f"{plan.left} rows: no line for each")
        self._stage = "loading the model"
        self._bar.update(self._task, total=plan.left)

    def began(self, batcher: Batcher, summary: Summary) -> None:
        self._summary, self._has_begun = summary, True

    def ended(self, item: Item, result: Result, in_flight: int) -> None:
        self._in_flight = in_flight
        if self._only_here or len(self._rows) <= SHOWN_ROWS:
            self._rows.append((item, result))
        if self._is_shown(result):
            line = Text.assemble(
                (plain_text(self._label(item.row), MAX_NAME), "bold"),
                ": ",
                self._answer(result),
            )
            line = Text(" ").join(line.split()) if "\n" in line.plain else line
            is_wide = not self._err.is_terminal
            with _whatever_becomes_of_the_terminal():
                self._err.print(
                    line, no_wrap=not is_wide, overflow="ellipsis", soft_wrap=is_wide
                )
        self._remaining.update(self._summary, in_flight)
        self._bar.update(self._task, completed=self._summary.ended_rows)

    def _is_shown(self, result: Result) -> bool:
        """Whether an answer gets a line; long jobs show only new kinds of failure."""
        kinds = len(self._summary.reasons.counts)
        is_new, self._num_kinds = kinds > self._num_kinds, kinds
        self._shown += 1
        num_rows = self._shown if self._left is None else self._left
        if self._left is None and self._shown == SHOWN_ROWS + 1:
            self._say_how_long(f"more than {SHOWN_ROWS} rows: no further line for each")
        if self._quiet:
            return False
        if self._verbose or num_rows <= SHOWN_ROWS:
            return True
        return is_new and result.error is not None

    def _say_how_long(self, said: str) -> None:
        if not (self._verbose or self._quiet):
            self._err.print(
                f"{said}, but for failures of a new kind; --verbose shows them all",
                soft_wrap=True,
            )

    def _say_plainly(self) -> None:
        """Print progress now and then, without a terminal."""
        while not self._is_over.wait(PLAIN_SECONDS):
            if self._err.is_terminal:
                continue
            said = f"[{self._stage}]"
            if self._has_begun:
                said = f"[{self._place()}] {self.progress()}"
            with _whatever_becomes_of_the_terminal():
                self._err.print(said, soft_wrap=True, markup=False)

    def _place(self) -> str:
        done, asked = self._summary.ended_rows, self._summary.asked_rows
        return f"{done} of {asked}" if asked is not None else f"{done} done"

    def progress(self) -> str:
        return ", ".join(self.parts())

    def parts(self) -> list[str]:
        """Return the stage, or the figures of a job under way; a narrow terminal shows the first of them."""
        if not self._has_begun:
            return [self._stage]
        summary = self._summary
        if not summary.ended_rows:
            return ["answering"]
        seconds = summary.seconds
        parts = [f"{summary.failed} failed"] if summary.failed else []
        left = self._remaining.seconds(summary, time.perf_counter() - summary.began)
        if left is not None:
            parts.append(f"{spell_seconds(left)} left")
        if summary.pictures:
            parts.append(f"{summary.pictures / seconds:.1f} pictures/s")
        parts.append(f"{summary.tokens / seconds:.0f} tokens/s")
        parts.append(f"{self._in_flight} in flight")
        parts.append(spell_memory())
        if summary.cached_tokens:
            cached = summary.cached_tokens / summary.prompt_tokens
            parts.append(f"{cached:.0%} of prompts cached")
        if summary.busy_share is not None:
            parts.append(f"engine busy {summary.busy_share:.0%}")
        return parts

    # ---- at the end ----

    def show(self, summary: Summary) -> None:
        """Print what became of the job."""
        has_nothing_left = not summary.ended_rows and summary.done_before > 0
        if has_nothing_left:
            self._out.print(
                f"nothing is left to ask: {count_of(summary.done_before, 'row')} answered before"
            )
        has_table = not has_nothing_left and self._has_table()
        if has_table:
            self._out.print(self._table())
        if summary.interrupted or not has_nothing_left:
            self._out.print(self._totals(summary), soft_wrap=True)
        for said in self._advice(summary):
            self._out.print(Text(said), soft_wrap=True)
        if summary.ended_rows >= FIGURES_FROM and not self._quiet:
            self._show_figures(summary)
        if summary.failed and not has_table:
            self._out.print(_reasons(summary))
        if self._answers_in is not None:
            said = plain_text(f"answers: {self._answers_in}")
            self._out.print(Text(said), soft_wrap=True)

    def _has_table(self) -> bool:
        if self._only_here:
            return True
        return not self._quiet and len(self._rows) <= SHOWN_ROWS

    def _show_figures(self, summary: Summary) -> None:
        for part in (_seconds_in_batch(summary), _stages(summary)):
            if part is not None:
                self._out.print(part)
        if summary.busy_share is not None:
            self._out.print(
                f"the engine had work for {summary.busy_share:.0%} of the time",
                soft_wrap=True,
            )

    def _advice(self, summary: Summary) -> Iterator[str]:
        """Yield hints about rows without whole answers."""
        if summary.interrupted and self._goes_on:
            yield "the same command with --resume goes on from here"
        elif summary.failed and self._goes_on:
            yield f"{count_of(summary.failed, 'row')} failed; --retry-errors asks them again"
        if summary.failed_before:
            yield f"{count_of(summary.failed_before, 'row')} failed before; --retry-errors asks them again"
        if summary.cut:
            yield f"{count_of(summary.cut, 'answer')} of the longest length: cut short, unless --max-tokens was meant so"
        if summary.otherwise:
            rows = count_of(summary.otherwise, "row")
            yield f"{rows} answered before asked something else then: their answers are to that; --overwrite asks all again"
        if summary.again:
            named = ", ".join(repr(brief(one, MAX_NAME)) for one in summary.again_ids)
            named += ", ..." * (summary.again > len(summary.again_ids))
            yield plain_text(
                f"{count_of(summary.again, 'row')} skipped whose id had come before: {named}"
            )

    def _answer(self, result: Result) -> Text:
        """Return an answer, whole where nothing else has it."""
        return answer_text(result, None if self._only_here else MAX_ANSWER)

    def _table(self) -> Table:
        rows = sorted(self._rows, key=lambda row: row[0].number)
        # a file that fails is asked nothing
        asked_alike = len({item.prompt for item, _ in rows if item.prompt}) <= 1
        table = Table(
            Column("picture", overflow="fold", max_width=60),
            Column("size", no_wrap=True),
            *([] if asked_alike else [Column("question", overflow="fold")]),
            Column(
                "answer", overflow="fold", ratio=1 if self._out.is_terminal else None
            ),
            Column("tokens", justify="right", no_wrap=True),
            Column("seconds", justify="right", no_wrap=True),
            Column("status", no_wrap=True),
            box=box.SIMPLE_HEAD,
        )
        for item, result in rows:
            sizes = " + ".join(
                [f"{width}x{height}" for width, height in result.image_sizes]
                + [
                    f"{frames} of {width}x{height}"
                    for frames, width, height in result.video_sizes
                ]
            )
            table.add_row(
                Text(plain_text(self._label(item.row), MAX_NAME)),
                brief(sizes, MAX_NAME) or "-",
                *(
                    []
                    if asked_alike
                    else [Text(plain_text(item.prompt or "", MAX_QUESTION))]
                ),
                self._answer(result),
                str(result.usage.completion_tokens),
                "-"
                if result.error is not None
                else f"{result.timings.total - result.timings.queue:.2f}",
                Text(result.finish_reason, style=STATUS_STYLES[result.finish_reason]),
            )
        return table

    def _totals(self, summary: Summary) -> Text:
        done, asked = summary.ended_rows, summary.asked_rows
        known = f"{done} of {asked}" if asked is not None else str(done)
        totals = Text(
            f"{known} requests done"
            if summary.interrupted
            else count_of(done, "request")
        )
        totals.append(", ")
        totals.append(
            count_of(summary.failed, "error"),
            style="red" if summary.failed else "green",
        )
        took, rate = summary.seconds, summary.tokens / summary.seconds
        each = f"{took / max(1, done):.2g} s a request, {rate:.1f} tokens/s"
        totals.append(f", {count_of(summary.tokens, 'token')} in {took:.2f} s: {each}")
        if summary.interrupted:
            totals.append(" (interrupted)", style="yellow")
        return totals


def _seconds_in_batch(summary: Summary) -> Group | None:
    buckets = summary.in_batch.filled()
    if not buckets:
        return None
    half, most = summary.in_batch.quantile(0.5), summary.in_batch.quantile(0.95)
    said = f"(half within {half:.2g}, 95 % within {most:.2g})"
    table = Table(box=None, show_header=False)
    largest = max(count for _, _, count in buckets)
    for least, high, count in buckets:
        bar = "#" * max(min(count, 1), round(40 * count / largest))
        table.add_row(
            Text(f"{least:.2g} - {high:.2g}", justify="right"),
            bar,
            Text(str(count), justify="right"),
        )
    title = f"seconds of a row in the batch, which it shares {said}"
    return Group(Text(title, style="italic"), table)


def _stages(summary: Summary) -> Table | None:
    if not summary.answered:
        return None
    table = Table(
        title="where a row's time goes (mean seconds)",
        title_justify="left",
        box=None,
        show_header=False,
    )
    for stage, said, seconds in summary.mean_stages:
        table.add_row(stage, f"{seconds:.3f}", Text(said, style="dim"))
    return table


def _reasons(summary: Summary) -> Table:
    table = Table(
        title="failures, by the first of each kind",
        title_justify="left",
        box=None,
        show_header=False,
    )
    for reason, count in summary.reasons.most_common(8):
        table.add_row(
            Text(str(count), justify="right"), Text(plain_text(reason), style="red")
        )
    return table


def print_wrong(console: Console, plan: Plan) -> None:
    """Print the rows that will fail, by kind."""
    for message, count in plan.wrong.most_common(8):
        said = f"{count_of(count, 'row')} cannot be asked{', the first' if count > 1 else ''}: {message}"
        console.print(Text(plain_text(said)), soft_wrap=True)


@contextlib.contextmanager
def _whatever_becomes_of_the_terminal() -> Iterator[None]:
    """Ignore write errors of a hung-up terminal; its signal comes later."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


# ---- words ----


def spell_memory() -> str:
    """Return this process's peak memory, and MLX's on a GPU."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    said = f"{peak / 1e9:.1f} GB"
    # loaded with the model; not loaded here for the sake of a figure
    if "mlx.core" in sys.modules:
        mx = sys.modules["mlx.core"]
        if mx.default_device() == mx.Device(mx.gpu):
            from vlm_batch.runtime.memory import peak_bytes

            said += f" ({peak_bytes() / 1e9:.1f} GB by MLX)"
    return said


def spell_seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def answer_text(result: Result, most: int | None = None) -> Text:
    """Return an answer, of at most so many characters, or its error."""
    if result.error is not None:
        return Text(plain_text(result.error, MAX_ANSWER), style="red")
    return (
        Text(plain_text(result.text, most))
        if result.text
        else Text("(empty)", style="dim")
    )
