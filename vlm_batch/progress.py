"""The progress bar of ``VLMBatcher.generate``."""

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
def progress_bar(
    total: int | None, *, enabled: bool
) -> Iterator[Callable[[Result], None]]:
    """Yield a function to call with each result. ``total`` None: no end is shown."""
    if not enabled:
        yield lambda result: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    num_tokens = num_failed = 0
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("answering", total=total, note="")

        def advance(result: Result) -> None:
            nonlocal num_tokens, num_failed
            num_tokens += result.usage.completion_tokens
            num_failed += not result.ok
            note = f"{num_tokens} tokens" + (
                f", [red]{num_failed} failed[/red]" if num_failed else ""
            )
            progress.update(task, advance=1, note=note)

        yield advance
