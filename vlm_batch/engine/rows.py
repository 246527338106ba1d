"""All rows of an engine."""

from __future__ import annotations

import contextlib
import time
from collections import Counter

import mlx.core as mx

from vlm_batch.engine.admission import Admission
from vlm_batch.engine.groups import DecodeGroups
from vlm_batch.engine.reuse import Reuse, keeping
from vlm_batch.engine.row import Ending, Prompt, Row, Status, fork
from vlm_batch.engine.scheduler import Scheduler
from vlm_batch.errors import let_go
from vlm_batch.types import Event, FinishReason


class Rows:
    def __init__(
        self,
        waiting: Admission,
        batch: DecodeGroups,
        scheduler: Scheduler,
        reuse: Reuse,
    ) -> None:
        self.waiting = waiting
        self.batch = batch
        self.by_id: dict[str, Row] = {}
        self.prefilling: dict[str, Row] = {}
        #: Further answers and parked rows, which wait for a place, with the logits (1, V) of their next token.
        self.forks: dict[Row, mx.array] = {}
        self.events: list[Event] = []
        self._are_others = True  # than were noted last
        self._scheduler = scheduler
        self._reuse = reuse

    def add(self, row: Row) -> None:
        """Queue a new row. Raises ValueError for an id in use."""
        if row.request_id in self.by_id:
            raise ValueError(f"request id {row.request_id!r} is already in use")
        self.by_id[row.request_id] = row
        self._are_others = True
        self.waiting.add(row)

    @property
    def is_active(self) -> bool:
        return len(self.by_id) > len(self.waiting.unprepared)

    @property
    def num_pending(self) -> int:
        """Prompt tokens left of rows with places."""
        return sum(
            row.facts.length - row.prompt.prefilled for row in self.prefilling.values()
        )

    def live(self) -> list[Row]:
        """Return the rows with places, in their order."""
        return self.waiting.line(
            [*self.batch.rows, *self.prefilling.values()], placed={}
        )

    def note_placed(self) -> None:
        """Note each client's places and rows."""
        placed = Counter(
            row.client for row in (*self.batch.rows, *self.prefilling.values())
        )
        self.waiting.note_placed(
            placed, self.by_id.values() if self._are_others else None
        )
        self._are_others = False

    def place(self, row: Row) -> None:
        row.status = Status.PREFILL
        row.clock.placed = row.clock.placed or time.perf_counter()
        self.waiting.remove(row)
        self.prefilling[row.request_id] = row

    def join(self, row: Row, logits: mx.array, others: int) -> None:
        """Move a prefilled row to the batch; free its embeddings. Siblings become forks."""
        for sibling in fork(row) if row.siblings else ():
            self.by_id[sibling.request_id] = sibling
            self._are_others = True
            self.forks[sibling] = logits
        caches, row.prompt = row.prompt.cache, Prompt()
        assert caches is not None
        self.prefilling.pop(row.request_id, None)
        self.waiting.memory.learn(caches, row.facts.length + row.answer.num_fed)
        self.batch.join(row, caches, others)

    def hold(self, row: Row) -> None:
        """Free the place and caches of a prefilled row that asks for no token. It ends once its work was read."""
        row.answer.ending = Ending(None, "", None, "length", None)
        row.prompt = Prompt()
        self.prefilling.pop(row.request_id, None)

    def park(self, row: Row, logits: mx.array) -> None:
        """Preempt a decoding row, with its caches and the logits (1, V) of its last forward."""
        group = self.batch.of(row)
        assert group is not None
        cache = group.take(row)
        self.batch.leave(row)
        row.status, row.prompt = (
            Status.WAITING,
            Prompt(cache=cache, prefilled=row.facts.length),
        )
        self.forks[row] = logits

    def leave(self, row: Row) -> None:
        """Free a row's place; keep its caches if wanted."""
        group = self.batch.of(row)
        has_caches = group is not None or row.is_parked
        if has_caches and self._reuse.wants_caches(row):
            with keeping(row):
                row.reuse.left = row.prompt.cache if group is None else group.take(row)
        self.batch.leave(row)

    def put_back(self, row: Row) -> None:
        self._take_out(row)
        row.begin_again()
        self.waiting.add(row)

    def finish(self, row: Row, ending: Ending) -> None:
        """End a complete row. Raises if the user's cache cannot be saved."""
        row.answer.ending = ending
        # of an answer without tokens: its end
        row.clock.first_token = row.clock.first_token or time.perf_counter()
        self.leave(row)
        cache = self._reuse.end(row)
        result = row.result(ending.reason, ending.stop_reason, cache=cache)
        self._scheduler.end()
        self.events.append(
            Event(row.request_id, ending.token, ending.text, ending.logprobs, result)
        )
        self.forget(row)

    def end(
        self, row: Row, reason: FinishReason, error: BaseException | None = None
    ) -> None:
        """End an incomplete row, and its siblings."""
        cache = None
        if reason == "cancelled" and (row.status is Status.DECODE or row.is_parked):
            # cancelled, even if its caches are lost
            with contextlib.suppress(Exception):
                self.leave(row)
                cache = self._reuse.end(row)
        if error is not None:
            let_go(error)
        if (ending := row.answer.ending) is not None:
            self.events.append(
                Event(row.request_id, ending.token, ending.text, ending.logprobs)
            )
        self.events.append(
            Event(row.request_id, result=row.result(reason, error=error, cache=cache))
        )
        for sibling in row.siblings:
            self.events.append(
                Event(sibling.request_id, result=sibling.result(reason, error=error))
            )
            sibling.clear()
        if row.status is Status.DECODE or row.is_parked:
            self._scheduler.end()
        self.forget(row)

    def forget(self, row: Row) -> None:
        del self.by_id[row.request_id]
        self._are_others = True
        self._take_out(row)
        if row.reuse.continues is not None:  # its user's cache was not used
            row.reuse.continues.release()
        row.clear()

    def tell(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def _take_out(self, row: Row) -> None:
        self.waiting.remove(row)
        self.forks.pop(row, None)
        self.prefilling.pop(row.request_id, None)
        self.batch.leave(row)
