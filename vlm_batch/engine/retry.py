"""Settles rows whose work failed or that outgrew the memory.

A row's own failure ends it. If shared work fails, its rows are recomputed alone until the culprit fails. If memory runs
out, fewer rows at a time are recomputed. They keep their place in line and their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import mlx.core as mx

from vlm_batch.arrays import num_bytes
from vlm_batch.engine.memory import GROWTH, RowMemory
from vlm_batch.engine.row import Row, Status
from vlm_batch.engine.rows import Rows
from vlm_batch.engine.scheduler import Scheduler
from vlm_batch.engine.work import Failed, attempt, note_again
from vlm_batch.errors import OutOfMemory, describe, is_out_of_memory
from vlm_batch.runtime.memory import release_memory
from vlm_batch.store.budget import ByteBudget

Made = TypeVar("Made")


class Retry:
    """Settles failures. ``kept``: memory for later requests, freed before a row is refused."""

    def __init__(
        self, rows: Rows, scheduler: Scheduler, memory: RowMemory, kept: ByteBudget
    ) -> None:
        self._rows = rows
        self._scheduler = scheduler
        self._memory = memory
        self._kept = kept
        self._until_look = 0  # steps until the next check of memory
        self.num_recomputed = 0  # rows that were recomputed

    def settle(self, failed: Failed) -> None:
        """Recompute rows, or end them with the error."""
        rows, error, batch = failed.rows, failed.error, self._rows.batch
        is_want = is_out_of_memory(error)
        if not failed.is_shared:
            # ended by another failure of the call
            rows = [row for row in rows if row.status is not Status.FINISHED]
            if not rows:
                return
            if is_want and not isinstance(error, OutOfMemory):
                self._wait_for_memory(rows, error)
                return
            for row in rows:
                self._rows.end(row, "error", error)
            return
        group = batch.of(rows[0])
        is_alone = len(rows) == 1 and (
            rows[0].is_suspect or (group is not None and group.is_apart)
        )
        found = dict.fromkeys([*rows, *batch.drop(rows)])
        lost = [row for row in found if row.status is not Status.FINISHED]
        if is_want:
            self._wait_for_memory(lost, error)
            return
        if again := len(lost) - (is_alone and rows[0] in lost):
            note_again(again, error)
        for row in lost:
            if is_alone and row is rows[0]:
                self._rows.end(row, "error", error)
            else:
                row.suspect()
                self._begin_again(row, error)

    def settled(self, made: Iterable[Made | Failed] | Failed) -> Iterator[Made]:
        """Yield what was made; settle what failed."""
        for one in [made] if isinstance(made, Failed) else made:
            if isinstance(one, Failed):
                self.settle(one)
            else:
                yield one

    def attempt(self, row: Row, work: Callable[..., None], *arguments: Any) -> bool:
        """Do a row's own work. If it raises, settle that and return False."""
        failed = attempt([row], work, *arguments)
        if failed is not None:
            self.settle(failed)
        return failed is None

    def keep_within_memory(self) -> None:
        """Preempt last rows in line while rows exceed the bound."""
        self._until_look -= 1
        if self._until_look > 0 or self._memory.max_bytes is None:
            return
        self._until_look = GROWTH
        live = self._rows.live()
        while live and not self._memory.fits(live[-1], live[:-1]):
            row = live.pop()
            if live:
                self._begin_again(
                    row, OutOfMemory("keys and values have grown beyond max_bytes")
                )
            else:
                self.attempt(row, self._memory.check, row)

    def _wait_for_memory(self, rows: Sequence[Row], error: BaseException) -> None:
        """Recompute rows that ran out of memory, one fewer at a time. A row that fails twice alone ends."""
        # It releases MLX's freed arrays for other processes, and against fragmentation.
        live = len({*self._rows.live(), *rows})
        self._scheduler.run_out(live)
        if live == 1:
            self._kept.clear()
        never = [row for row in rows if live == 1 and row.was_alone]
        for row in rows:
            if row not in never:
                row.was_alone = live == 1
                self._begin_again(row, error)
        release_memory()
        for row in never:
            self._rows.end(row, "error", _too_large(row, error))

    def _begin_again(self, row: Row, error: BaseException) -> None:
        """Put a row back in line; end it if its inputs are gone."""
        if row.status is Status.FINISHED:
            return
        if row.given is None:
            self._rows.end(row, "error", error)
            return
        self._rows.put_back(row)
        self.num_recomputed += 1


def _too_large(row: Row, error: BaseException) -> OutOfMemory:
    prompt = f"{row.facts.length} tokens ({row.facts.image_tokens} of pictures)"
    if not row.facts.length:
        prompt = f"{num_bytes(row.given) / 1e6:,.1f} MB"
    answer = f"a prompt of {prompt} and up to {row.params.max_tokens} of answer"
    said = f"the request does not fit into memory, even alone: {answer}; MLX holds {mx.get_active_memory() / 1e6:,.0f} MB"
    return OutOfMemory(f"{said} beside it ({describe(error)})")
