"""Rows that begin again: after a forward that failed, until the culprit is found, and for want of memory.

What raises is one row's (``Recovery.guard``), or of work that rows share (``Recovery.together``). Shared work that raises is
nobody's fault yet: its rows begin again, and are tried apart where it was. A row that begins again keeps its place in line and
comes back to the tokens that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from vlm_batch.engine.faults import is_users_own, let_go, raised_in, too_large
from vlm_batch.engine.groups import DecodeGroups
from vlm_batch.engine.memory import GROWTH, RowMemory
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Row, Status
from vlm_batch.engine.scheduler import Scheduler
from vlm_batch.errors import OutOfMemory, is_out_of_memory
from vlm_batch.runtime.memory import give_back

T = TypeVar("T")


class Owner(Protocol):
    """The generator that a ``Recovery`` belongs to: it has the rows."""

    def live(self) -> list[Row]:
        """The rows that have places, the first in line first."""

    def fail(self, row: Row, error: BaseException) -> None:
        """End a row with an error."""

    def put_back(self, row: Row) -> None:
        """Take a row's place from it, and put it back in line to begin again."""


class Recovery:
    """Decides what becomes of rows whose work raised. ``owner`` is best a weak reference: its parts hold this."""

    def __init__(
        self, owner: Owner, batch: DecodeGroups, scheduler: Scheduler, reuse: Reuse, memory: RowMemory
    ) -> None:
        self._owner = owner
        self._batch = batch
        self._scheduler = scheduler
        self._reuse = reuse
        self._memory = memory
        self._until_look = 0  # steps, until it is asked whether rows have outgrown the memory
        self.num_recomputed = 0  # rows that began again, after a failed step or for want of memory

    def guard(self, row: Row, work: Callable[..., T], *arguments: Any, **how: Any) -> T | None:
        """Do one row's work; whatever it raises ends that row with an error and gives None. For want of memory it waits
        and begins again."""
        try:
            return work(*arguments, **how)
        except BaseException as error:
            if is_users_own(error):
                raise
            error = raised_in(error)
            if is_out_of_memory(error) and not isinstance(error, OutOfMemory):
                self._wait_for_memory([row], error)
            else:
                self._owner.fail(row, error)
            return None

    def together(self, rows: Sequence[Row], work: Callable[..., T], *arguments: Any) -> T | None:
        """Do work that rows share; None if it raises. Then it is nobody's fault yet, and no array that it may have touched is
        trusted: these rows, and all whose caches lie in the same arrays, begin again, and are tried apart where it was. Who
        fails apart is the culprit."""
        try:
            return work(*arguments)
        except BaseException as error:
            if is_users_own(error):
                raise
            error = raised_in(error)
            is_apart = len(rows) == 1 and (self._batch.is_apart(rows[0]) or rows[0].is_suspect)
            found = dict.fromkeys([*rows, *self._batch.drop(rows)])
            lost = [row for row in found if row.status is not Status.FINISHED]  # others ended by an error of their own
            if is_out_of_memory(error):
                self._wait_for_memory(lost, error)
                return None
            for row in lost:
                if is_apart and row is rows[0]:
                    self._owner.fail(row, error)
                else:
                    row.suspect()
                    self._begin_again(row, error)
            return None

    def set_apart(self) -> None:
        """Give rows that a failed forward may be the fault of a forward of their own, and let those back that are past it."""
        for row in self._batch.misplaced():
            self.guard(row, self._batch.move, row)

    def keep_within_memory(self) -> None:
        """Have the last in line wait where rows have grown beyond the bound; one that has done so alone ends."""
        self._until_look -= 1
        if self._until_look > 0 or self._memory.max_bytes is None:
            return
        self._until_look = GROWTH
        live = self._owner.live()
        while live and not self._memory.fits(live[-1], live[:-1]):
            row = live.pop()
            if live:
                self._begin_again(row, OutOfMemory("keys and values have grown beyond max_bytes"))
            else:
                self.guard(row, self._memory.check, row)

    def _wait_for_memory(self, rows: Sequence[Row], error: BaseException) -> None:
        """Rows that found no memory begin again, one row fewer at a time: the last in line, by priority and age, waits until
        others have ended. Who does not fit alone, though all that was kept for later requests is gone, never will.

        What MLX keeps of freed arrays is given back each time, theirs too: where another process has taken memory, or none
        of what is free is in one piece, MLX says that there is none without having tried without it.
        """
        live = len({*self._owner.live(), *rows})
        self._scheduler.run_out(live)
        if live == 1:
            self._reuse.budget.clear()
        never = [row for row in rows if live == 1 and row.was_alone]
        for row in rows:
            if row not in never:
                row.was_alone = live == 1
                self._begin_again(row, error)
        let_go(error)  # the calls that it came through hold what they had made
        give_back()
        for row in never:
            self._owner.fail(row, too_large(row, error))

    def _begin_again(self, row: Row, error: BaseException) -> None:
        """Put a row back in line, in its place by priority and age; it ends with the error if nothing is left of its prompt."""
        if row.status is Status.FINISHED:
            return
        if row.given is None:
            self._owner.fail(row, error)
            return
        self._owner.put_back(row)
        self.num_recomputed += 1
