"""Settles rows whose work failed or that outgrew the memory.

A row's own failure ends it. If shared work fails, its rows are recomputed alone until the culprit fails. If memory runs
out, fewer rows at a time are recomputed. They keep their turn and their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import mlx.core as mx

from vlm_batch.arrays import num_bytes
from vlm_batch.engine.limit import Capacity
from vlm_batch.engine.row import Row
from vlm_batch.engine.rows import Rows
from vlm_batch.engine.work import Failed, attempt, note_again
from vlm_batch.errors import OutOfMemory, describe, is_out_of_memory
from vlm_batch.runtime.memory import release_memory
from vlm_batch.store.budget import ByteBudget

Made = TypeVar("Made")


class Retry:
    """Settles failures. ``kept``: memory for later requests, freed before a row is refused."""

    def __init__(self, rows: Rows, capacity: Capacity, kept: ByteBudget) -> None:
        self._rows = rows
        self._capacity = capacity
        self._kept = kept
        self.num_recomputed = 0  # rows that were recomputed

    def settle(self, failed: Failed) -> None:
        """Recompute rows, or end them with the error."""
        if failed.is_shared:
            self._settle_shared(failed.rows, failed.error)
            return
        # the others were ended by another failure of the call
        rows, error = _alive(failed.rows), failed.error
        if not rows:
            return
        is_refused = isinstance(error, OutOfMemory)
        if is_out_of_memory(error) and not is_refused:
            self._wait_for_memory(rows, error)
            return
        for row in rows:
            self._rows.end(row, "error", error)

    def _settle_shared(self, rows: Sequence[Row], error: BaseException) -> None:
        """Recompute the rows of a group whose shared work raised; end a row that had failed before, and now alone."""
        rows = list(dict.fromkeys(rows))  # one of several positions is there as often
        is_culprit = len(rows) == 1 and self._is_apart(rows[0])
        dropped = self._rows.batch.drop(rows)
        lost = _alive(dict.fromkeys([*rows, *dropped]))
        if is_out_of_memory(error):
            self._wait_for_memory(lost, error)
            return
        if is_culprit and rows[0] in lost:
            lost.remove(rows[0])
            self._rows.end(rows[0], "error", error)
        if lost:
            note_again(len(lost), error)
        for row in lost:
            row.suspect()
            self._begin_again(row, error)

    def _is_apart(self, row: Row) -> bool:
        """Return whether a row has failed before, and was alone for that."""
        group = self._rows.batch.of(row)
        return row.is_suspect or (group is not None and group.is_apart)

    def made(self, made: Iterable[Made | Failed]) -> Iterator[Made]:
        """Yield what was made; settle what failed."""
        for one in made:
            if isinstance(one, Failed):
                self.settle(one)
            else:
                yield one

    def settle_all(self, found: Iterable[Failed | None]) -> None:
        """Settle what failed."""
        for _ in self.made(found):
            pass

    def attempt(self, row: Row, work: Callable[..., None], *arguments: Any) -> bool:
        """Do a row's own work. If it raises, settle that and return False."""
        failed = attempt([row], work, *arguments)
        if failed is not None:
            self.settle(failed)
        return failed is None

    def outgrow(self, row: Row) -> None:
        """Preempt a row beyond the memory that rows have grown over."""
        error = OutOfMemory("keys and values have grown beyond max_bytes")
        self._begin_again(row, error)

    def _wait_for_memory(self, rows: Sequence[Row], error: BaseException) -> None:
        """Recompute rows that ran out of memory, one fewer at a time. A row that fails twice alone ends."""
        # It releases MLX's freed arrays for other processes, and against fragmentation.
        live = {*self._rows.live(), *rows}
        self._capacity.run_out(len(live))
        is_alone = len(live) == 1
        if is_alone:
            self._kept.clear()
        for row in rows:
            if is_alone and row.was_alone:
                release_memory()
                self._rows.end(row, "error", _too_large(row, error))
            else:
                row.was_alone = is_alone
                self._begin_again(row, error)
        release_memory()

    def _begin_again(self, row: Row, error: BaseException) -> None:
        """Put a row back in line; end it if its inputs are gone."""
        if not row.given:
            self._rows.end(row, "error", error)
            return
        self._rows.put_back(row)
        self.num_recomputed += 1


def _alive(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if not row.has_ended]


def _too_large(row: Row, error: BaseException) -> OutOfMemory:
    prompt = f"{row.facts.length} tokens ({row.facts.image_tokens} of pictures)"
    if not row.facts.length:
        prompt = f"{num_bytes(row.given) / 1e6:,.1f} MB"
    answer = f"a prompt of {prompt} and up to {row.params.max_tokens} of answer"
    said = f"the request does not fit into memory, even alone: {answer}; MLX holds {mx.get_active_memory() / 1e6:,.0f} MB"
    return OutOfMemory(f"{said} beside it ({describe(error)})")
