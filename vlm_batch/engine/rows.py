"""Every row of an engine: where each is, how it gets in, back in line and out, and what is told of it."""

from __future__ import annotations

import contextlib
import time

import mlx.core as mx

from vlm_batch.engine.admission import Admission
from vlm_batch.engine.groups import DecodeGroups
from vlm_batch.engine.reuse import Reuse, if_it_can_be
from vlm_batch.engine.row import Ending, Prompt, Row, Status, fork
from vlm_batch.engine.scheduler import Scheduler
from vlm_batch.errors import let_go
from vlm_batch.store.prompt import PromptCache
from vlm_batch.types import Event, FinishReason


class Rows:
    """The rows of an engine. Each waits, is in prefill, is a fork, or decodes; or its last token is on its way.

    ``waiting`` has those without a place, ``prefilling`` and ``batch`` those with one. ``forks`` are further answers to
    prefilled prompts, with those prompts' logits (1, V): they wait for a place and nothing else.
    """

    def __init__(self, waiting: Admission, batch: DecodeGroups, scheduler: Scheduler, reuse: Reuse) -> None:
        self.waiting = waiting
        self.batch = batch
        self.by_id: dict[str, Row] = {}
        self.prefilling: dict[str, Row] = {}
        self.forks: list[tuple[Row, mx.array]] = []
        self.events: list[Event] = []
        self._scheduler = scheduler
        self._reuse = reuse

    def add(self, row: Row) -> None:
        """Put a new row in line: to be prepared, where it has a question. Raises ValueError for an id in use."""
        if row.request_id in self.by_id:
            raise ValueError(f"request id {row.request_id!r} is already in use")
        self.by_id[row.request_id] = row
        self.waiting.add(row)

    @property
    def is_active(self) -> bool:
        """Whether any row has been prepared."""
        return len(self.by_id) > len(self.waiting.unprepared)

    @property
    def num_pending(self) -> int:
        """Prompt tokens that have places and are not prefilled."""
        return sum(row.facts.length - row.prompt.prefilled for row in self.prefilling.values())

    def live(self) -> list[Row]:
        """The rows that have places, the first in line first."""
        return sorted(dict.fromkeys([*self.batch.rows, *self.prefilling.values()]), key=self.waiting.urgency)

    def place(self, row: Row) -> None:
        """Give an encoded row a place: its prompt is prefilled from now on."""
        row.status = Status.PREFILL
        row.clock.placed = row.clock.placed or time.perf_counter()
        self.waiting.remove(row)
        self.prefilling[row.request_id] = row

    def join(self, row: Row, logits: mx.array, others: int) -> None:
        """Move a row whose prompt is done to the decoding batch, which ``others`` will join at once; its embeddings and
        features are freed here. Its siblings become forks."""
        for sibling in fork(row) if row.siblings else ():
            self.by_id[sibling.request_id] = sibling
            self.forks.append((sibling, logits))
        caches, row.prompt = row.prompt.cache, Prompt()
        assert caches is not None
        self.prefilling.pop(row.request_id, None)
        self.waiting.memory.learn(caches, row.facts.length)
        self.batch.join(row, caches, others)

    def leave(self, row: Row) -> None:
        """Free a row's place; its caches go with it, where they are wanted."""
        group, book = self.batch.of(row), row.reuse
        if group is not None and book is not None and book.is_wanted:
            with if_it_can_be(book):
                book.left = group.take(row)
        self.batch.leave(row)

    def put_back(self, row: Row) -> None:
        """Take a row's place from it, and put it back in line to begin again."""
        self._take_out(row)
        row.begin_again()
        self.waiting.add(row)

    def finish(self, row: Row, ending: Ending) -> None:
        """End a row whose answer is complete. Raises where its user wants its caches and there is no memory for them."""
        row.answer.ending = ending
        cache = self._saved(row)
        result = row.result(ending.reason, ending.stop_reason, cache=cache)
        self._scheduler.end()
        self.events.append(Event(row.request_id, ending.token, ending.text, ending.logprobs, result))
        self.forget(row)

    def end(self, row: Row, reason: FinishReason, error: BaseException | None = None) -> None:
        """End a row that is not complete, with the siblings that are to have its prompt."""
        cache = None
        if reason == "cancelled" and row.status is Status.DECODE:
            with contextlib.suppress(Exception):  # it was cancelled, whatever comes of its caches
                cache = self._saved(row)
        if error is not None:
            let_go(error)
        if (ending := row.answer.ending) is not None:
            self.events.append(Event(row.request_id, ending.token, ending.text, ending.logprobs))
        self.events.append(Event(row.request_id, result=row.result(reason, error=error, cache=cache)))
        for sibling in row.siblings:
            self.events.append(Event(sibling.request_id, result=sibling.result(reason, error=error)))
            sibling.clear()
        if row.status is Status.DECODE:
            self._scheduler.end()
        self.forget(row)

    def forget(self, row: Row) -> None:
        """Drop a row and all that it has, without an event."""
        del self.by_id[row.request_id]
        self._take_out(row)
        if row.reuse is not None and row.reuse.continues is not None:  # it ended before it took its user's cache
            row.reuse.continues.release()
        row.clear()

    def tell(self) -> list[Event]:
        """The events of rows since the last call."""
        events, self.events = self.events, []
        return events

    def _saved(self, row: Row) -> PromptCache | None:
        """Its answer is complete: its caches, saved for later requests and for its user."""
        self.leave(row)
        return self._reuse.end(row)

    def _take_out(self, row: Row) -> None:
        self.waiting.remove(row)
        self.prefilling.pop(row.request_id, None)
        self.batch.leave(row)
