"""A progress bar on stderr, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


@contextmanager
def progress_bar(total: int | None, *, enabled: bool) -> Iterator[Callable[[Result], None]]:
    """A function to be called with each result. ``total`` None shows a count without an end."""
    if not enabled:
        yield lambda result: None
        return
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        failed = 0
        tokens = 0

        def advance(result: Result) -> None:
            nonlocal failed, tokens
            failed += result.error is not None
            tokens += result.usage.completion_tokens
            bar.update(
                task, advance=1, description=f"{tokens} tokens" + (f", [red]{failed} failed[/red]" if failed else "")
            )

        yield advance
