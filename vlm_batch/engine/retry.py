"""The fate of rows whose work failed: alone, again or ended; and of those that have outgrown the memory.

A row's own work that raises ends the row. Shared work that raises is nobody's fault yet: no array that it may have touched is
trusted, its rows begin again, and are tried apart where it was. Who fails apart is the culprit. For want of memory rows begin
again, fewer at a time. A row that begins again keeps its place in line and comes back to the tokens that it had.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from vlm_batch.arrays import num_bytes
from vlm_batch.engine.memory import GROWTH, RowMemory
from vlm_batch.engine.row import Row, Status
from vlm_batch.engine.rows import Rows
from vlm_batch.engine.scheduler import Scheduler
from vlm_batch.engine.work import Failed, attempt
from vlm_batch.errors import OutOfMemory, describe, is_out_of_memory
from vlm_batch.runtime.memory import give_back
from vlm_batch.store.budget import ByteBudget


class Retry:
    """Settles failures. ``kept`` is what is held for later requests, and goes before a row is told that it never fits."""

    def __init__(self, rows: Rows, scheduler: Scheduler, memory: RowMemory, kept: ByteBudget) -> None:
        self._rows = rows
        self._scheduler = scheduler
        self._memory = memory
        self._kept = kept
        self._until_look = 0  # steps, until it is asked whether rows have outgrown the memory
        self.num_recomputed = 0  # rows that began again, after a failed step or for want of memory

    def settle(self, failed: Failed) -> None:
        """Have each of the rows begin again, or end with the error."""
        rows, error, batch = failed.rows, failed.error, self._rows.batch
        is_want = is_out_of_memory(error)
        if not failed.is_shared:
            rows = [row for row in rows if row.status is not Status.FINISHED]  # by another failure of the same call
            if not rows:
                return
            if is_want and not isinstance(error, OutOfMemory):
                self._wait_for_memory(rows, error)
                return
            for row in rows:
                self._rows.end(row, "error", error)
            return
        group = batch.of(rows[0])
        is_alone = len(rows) == 1 and (rows[0].is_suspect or (group is not None and group.is_apart))
        found = dict.fromkeys([*rows, *batch.drop(rows)])
        lost = [row for row in found if row.status is not Status.FINISHED]  # others ended by an error of their own
        if is_want:
            self._wait_for_memory(lost, error)
            return
        for row in lost:
            if is_alone and row is rows[0]:
                self._rows.end(row, "error", error)
            else:
                row.suspect()
                self._begin_again(row, error)

    def set_apart(self) -> None:
        """Give rows that a failed forward may be the fault of a forward of their own, let those back that are past it, and move
        those that have outgrown the columns of their group."""
        for row in self._rows.batch.misplaced():
            moved = attempt([row], self._rows.batch.move, row)
            if isinstance(moved, Failed):
                self.settle(moved)

    def keep_within_memory(self) -> None:
        """Have the last in line wait where rows have grown beyond the bound; one that has done so alone ends."""
        self._until_look -= 1
        if self._until_look > 0 or self._memory.max_bytes is None:
            return
        self._until_look = GROWTH
        live = self._rows.live()
        while live and not self._memory.fits(live[-1], live[:-1]):
            row = live.pop()
            if live:
                self._begin_again(row, OutOfMemory("keys and values have grown beyond max_bytes"))
            elif isinstance(failed := attempt([row], self._memory.check, row), Failed):
                self.settle(failed)

    def _wait_for_memory(self, rows: Sequence[Row], error: BaseException) -> None:
        """Rows that found no memory begin again, one row fewer at a time: the last in line, by priority and age, waits until
        others have ended. Who does not fit alone, though all that was kept for later requests is gone, never will.

        What MLX keeps of freed arrays is given back each time, theirs too: where another process has taken memory, or none
        of what is free is in one piece, MLX says that there is none without having tried without it.
        """
        live = len({*self._rows.live(), *rows})
        self._scheduler.run_out(live)
        if live == 1:
            self._kept.clear()
        never = [row for row in rows if live == 1 and row.was_alone]
        for row in rows:
            if row not in never:
                row.was_alone = live == 1
                self._begin_again(row, error)
        give_back()
        for row in never:
            self._rows.end(row, "error", _too_large(row, error))

    def _begin_again(self, row: Row, error: BaseException) -> None:
        """Put a row back in line, in its place by priority and age; it ends with the error if nothing is left of its prompt."""
        if row.status is Status.FINISHED:
            return
        if row.given is None:
            self._rows.end(row, "error", error)
            return
        self._rows.put_back(row)
        self.num_recomputed += 1


def _too_large(row: Row, error: BaseException) -> OutOfMemory:
    """The end of a row that found no memory though nobody was beside it, with the numbers."""
    prompt = f"{row.facts.length} tokens ({row.facts.image_tokens} of pictures)"
    if not row.facts.length:
        prompt = f"{num_bytes(row.given) / 1e6:,.1f} MB"
    answer = f"a prompt of {prompt} and up to {row.params.max_tokens} of answer"
    said = (
        f"the request does not fit into memory, even alone: {answer}; MLX holds {mx.get_active_memory() / 1e6:,.0f} MB"
    )
    return OutOfMemory(f"{said} beside it ({describe(error)})")
