"""The progress bar of ``VLMBatcher.generate`` and of the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from vlm_batch.types import Result


class Bar:
    """Results counted against a total (None: without an end), with their tokens and failures.

    ``stays``: the finished bar remains, in files and pipes too; otherwise it is for terminals alone.
    """

    def __init__(self, console: Console, total: int | None, doing: str, *, stays: bool) -> None:
        self.num_tokens = 0
        self.num_failed = 0
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        unseen = not stays and not console.is_terminal
        self._progress = Progress(*columns, console=console, disable=unseen, transient=not stays)
        self._task = self._progress.add_task(doing, total=total, note="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, doing: str) -> None:
        """Change the description beside the bar."""
        self._progress.update(self._task, description=doing)

    def advance(self, result: Result) -> None:
        """One more request has ended."""
        self.num_tokens += result.usage.completion_tokens
        self.num_failed += not result.ok
        note = f"{self.num_tokens} tokens" + (f", [red]{self.num_failed} failed[/red]" if self.num_failed else "")
        self._progress.update(self._task, advance=1, note=note)


@contextmanager
def progress_bar(total: int | None, *, enabled: bool) -> Iterator[Callable[[Result], None]]:
    """A function to be called with each result. ``total`` None shows a count without an end."""
    if not enabled:
        yield lambda result: None
        return
    with Bar(Console(stderr=True), total, "answering", stays=True) as bar:
        yield bar.advance
