"""``vlm-batch run --dry-run``."""

from __future__ import annotations

import contextlib
import itertools
import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, TextIO, runtime_checkable

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.text import Text

from vlm_batch.cli.console import brief, open_console, plain_text
from vlm_batch.cli.watching import (
    MAX_ANSWER,
    MAX_NAME,
    answer_text,
    print_wrong,
    spell_memory,
    spell_seconds,
)
from vlm_batch.jobs.plan import Job
from vlm_batch.jobs.questions import Item
from vlm_batch.jobs.rows import Ids, count_of
from vlm_batch.jobs.runner import Batcher, Counting, OpenBatcher, make_request
from vlm_batch.types import Request, Result, Stats

#: Rows shown, and most characters of a shown prompt.
DRY_ROWS = 8
MAX_PROMPT = 2000
#: Seconds, and answers after the first ones, that are enough to measure. The first rows count less: the batch fills up.
MOST_SECONDS, ENOUGH_ROWS = 20.0, 128
#: Seconds after which a dry run ends, whatever has ended; between two looks, and between two lines without a terminal.
LONGEST_SECONDS, LOOK_SECONDS, PLAIN_SECONDS = 60.0, 0.2, 10.0


@runtime_checkable
class Renders(Protocol):
    def rendered(self, request: Request) -> str | None: ...


@dataclass
class MeasuredPace:
    """Progress of a measured job.

    ``marks`` holds, per ended row, seconds, rows answered, and tokens of unfinished rows. ``is_over``: no more are asked.
    """

    handed: int = 0
    is_over: bool = False
    failed: int = 0
    answered: int = 0
    tokens: int = 0
    marks: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def ended(self) -> int:
        return self.failed + self.answered

    def add(self, result: Result, seconds: float, generated: int | None) -> None:
        """Count a row that ended; ``generated`` counts all tokens so far."""
        self.failed += not result.ok
        self.answered += result.ok
        self.tokens += result.usage.completion_tokens if result.ok else 0
        self.marks.append(
            (
                seconds,
                self.answered,
                0 if generated is None else max(0, generated - self.tokens),
            )
        )

    def is_enough(self, waited: float, last: float) -> bool:
        """Whether enough rows have ended, of those that were handed out, or it has taken long enough."""
        if 2 * self.ended < self.handed:
            return False
        is_late = max(waited, last) > MOST_SECONDS
        return is_late or self.answered >= 2 * DRY_ROWS + ENOUGH_ROWS

    def seconds_a_row(self) -> float:
        """Return seconds per further row."""
        # Short answers end first, so the mean length needs the tokens of unfinished rows, too.
        each = (self.tokens + self.marks[-1][2]) / max(1, self.answered)
        done = [
            answered + (more / each if each else 0.0)
            for _, answered, more in self.marks
        ]
        first = min(len(done) // 4, 2 * DRY_ROWS) - 1
        end = self.marks[-1][0]
        begin = self.marks[max(0, first)][0]
        before = done[max(0, first)]
        is_short = first < 0 or end - begin < end / 4
        if is_short or done[-1] <= before:
            # rows of one length end together: the first count, too
            begin = before = 0.0
        share = 1 - self.failed / max(1, self.handed)
        return (end - begin) / max(1.0, done[-1] - before) * share


def show_dry_run(
    job: Job, open_batcher: OpenBatcher, out: TextIO, *, cache_bytes: int
) -> int:
    """Ask the first rows; show prompts, sizes, tokens and an estimate for all."""
    console = open_console(out)
    plan = job.plan(Ids(), Ids())
    print_wrong(console, plan)
    items = (item for item in job.items() if item.error is None)
    shown = {item.id: item for item in itertools.islice(items, DRY_ROWS)}
    if not shown:
        console.print("no row among the first can be asked")
        return 1
    num_shown = len(shown)
    rest = job.ordered(itertools.chain(list(shown.values()), items))
    pace, results = MeasuredPace(), list[Result]()
    with _Progress() as progress, open_batcher() as batcher:
        since, last = time.monotonic(), 0.0
        found = _asked(batcher, _requests(rest, pace, shown, console), pace)
        while True:
            waited = time.monotonic() - since
            progress.show(pace, waited)
            has_shown = len(results) == len(shown)
            if waited > LONGEST_SECONDS or (has_shown and pace.is_enough(waited, last)):
                break  # and the others are cancelled
            try:
                one = found.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            if one is None:
                break
            if isinstance(one, BaseException):
                raise one
            last = one.seconds
            pace.add(one.result, one.seconds, one.generated)
            if one.result.request_id in shown:
                results.append(one.result)
        pace.is_over = True
        progress.stop()
        results.sort(key=lambda result: shown[result.request_id].number)
        for result in results:
            _show_asked(console, shown[result.request_id], result, batcher)
        if missing := len(shown) - len(results):
            console.print(
                f"{missing} of the first rows had not ended after {spell_seconds(LONGEST_SECONDS)}"
            )
        stats = _stats_of(batcher)
    num_rows = None if plan.total is None else plan.total - plan.wrong.counts.total()
    _show_estimate(console, num_rows, pace)
    kept = cache_bytes if stats is None else stats.cache_bytes
    more = max(0, cache_bytes - kept) / 1e9
    console.print(
        f"memory: {spell_memory()} so far; with what is kept for later rows at its most (--cache-bytes), {more:.1f} GB more",
        soft_wrap=True,
    )
    are_right = bool(results) and all(result.ok for result in results)
    return 0 if are_right and len(shown) == num_shown else 1


@dataclass(frozen=True)
class _Ended:
    """A result, when it came, and the tokens that all rows had by then."""

    result: Result
    seconds: float
    generated: int | None


def _asked(
    batcher: Batcher, requests: Iterator[Request], pace: MeasuredPace
) -> queue.Queue[_Ended | BaseException | None]:
    """Ask on a thread, so that a row that takes long keeps nobody waiting. None is the end, an exception, too.

    The thread waits until what it found is taken, and ends with ``pace.is_over``.
    """
    found: queue.Queue[_Ended | BaseException | None] = queue.Queue(maxsize=1)
    began = time.perf_counter()

    def tell(one: _Ended | BaseException | None) -> None:
        while not pace.is_over:
            with contextlib.suppress(queue.Full):
                found.put(one, timeout=LOOK_SECONDS)
                return

    def ask() -> None:
        try:
            for result in batcher.as_completed(requests):
                stats = _stats_of(batcher)
                generated = None if stats is None else stats.generated_tokens
                tell(_Ended(result, time.perf_counter() - began, generated))
            tell(None)
        except BaseException as error:
            tell(error)

    threading.Thread(target=ask, name="dry run", daemon=True).start()
    return found


def _stats_of(batcher: Batcher) -> Stats | None:
    return batcher.stats() if isinstance(batcher, Counting) else None


class _Progress:
    """Shows how far a dry run is: by a bar on a terminal, by a line now and then elsewhere."""

    def __init__(self) -> None:
        self._console = open_console(sys.stderr)
        said = TextColumn("{task.description}", markup=False)
        is_off = not self._console.is_terminal
        self._bar = Progress(
            SpinnerColumn(), said, console=self._console, disable=is_off, transient=True
        )
        self._task = self._bar.add_task("loading the model", total=None)
        self._next = PLAIN_SECONDS

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def show(self, pace: MeasuredPace, seconds: float) -> None:
        said = f"asking the first rows: {pace.ended} of {pace.handed} ended, {seconds:.0f} s of at most {LONGEST_SECONDS:.0f}"
        self._bar.update(self._task, description=said)
        if not self._console.is_terminal and seconds > self._next:
            self._next = seconds + PLAIN_SECONDS
            self._console.print(f"[{said}]", soft_wrap=True, markup=False)

    def stop(self) -> None:
        self._bar.stop()


def _requests(
    items: Iterator[Item], pace: MeasuredPace, shown: dict[str, Item], console: Console
) -> Iterator[Request]:
    """Yield requests; rows that cannot be one are no longer ``shown``, but for their errors."""
    for item in items:
        if pace.is_over:
            return
        request, asked = make_request(item)
        pace.handed += 1
        if request is not None:
            yield request
            continue
        pace.failed += 1
        if shown.pop(item.id, None) is not None:
            console.print(
                Text(
                    plain_text(f"{brief(item.id, MAX_NAME)}: {asked.error}", MAX_ANSWER)
                ),
                soft_wrap=True,
            )


def _show_estimate(console: Console, num_rows: int | None, pace: MeasuredPace) -> None:
    if not pace.marks:
        console.print("no row can be asked")
        return
    seconds, ended = pace.marks[-1][0], pace.ended
    each = pace.seconds_a_row() if ended != num_rows else seconds / ended
    if num_rows is None:
        console.print(
            f"{each:.2g} s a row; standard input does not say how many rows there are"
        )
        return
    whole = seconds + max(0, num_rows - ended) * each
    console.print(
        f"{count_of(num_rows, 'row')}, about {spell_seconds(whole)} and what it takes to load the model: {each:.2g} s a row, "
        f"measured on {ended}",
        soft_wrap=True,
    )


def _show_asked(console: Console, item: Item, result: Result, batcher: object) -> None:
    console.print(Text(plain_text(item.id, MAX_NAME), style="bold"), soft_wrap=True)
    rendered = None
    if isinstance(batcher, Renders):
        with contextlib.suppress(Exception):  # what is wrong with it, its result says
            rendered = batcher.rendered(item.request())
    if rendered is None:
        messages = item.messages or ({"role": "user", "content": item.prompt},)
        rendered = "\n".join(f"{one['role']}: {one['content']}" for one in messages)
    lines = rendered[:MAX_PROMPT].rstrip("\n").split("\n")
    if len(rendered) > MAX_PROMPT:
        lines.append(f"... and {len(rendered) - MAX_PROMPT:,} characters more")
    for line in lines:
        console.print(Text(plain_text(f"  | {line}")), soft_wrap=True)
    sizes = [f"{width}x{height}" for width, height in result.image_sizes]
    sizes += [
        f"{frames} frames of {width}x{height}"
        for frames, width, height in result.video_sizes
    ]
    sizes += [
        f"processed to {width}x{height}" for width, height in result.model_image_sizes
    ]
    usage = result.usage
    tokens = f"{usage.prompt_tokens} prompt tokens, {usage.image_tokens} of them pictures; {usage.completion_tokens} answered"
    console.print(Text("  " + "; ".join([*sizes, tokens]), style="dim"), soft_wrap=True)
    console.print(
        Text("  ").append_text(answer_text(result, MAX_ANSWER)), soft_wrap=True
    )
