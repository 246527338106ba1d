"""A row's moves from one stage to another, with what each takes and frees."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from vlm_batch.arrays import num_bytes
from vlm_batch.checks import check_within
from vlm_batch.engine.groups import DecodeGroups
from vlm_batch.engine.ledger import AHEAD, Ledger
from vlm_batch.engine.limit import Capacity
from vlm_batch.engine.memory import RowMemory, tokens
from vlm_batch.engine.options import begin_options
from vlm_batch.engine.reuse import Reuse, keeping
from vlm_batch.engine.row import Ending, Prompt, Row, Stage, fork
from vlm_batch.engine.schedule import Clients, WaitingRow, by_client, in_turn
from vlm_batch.errors import let_go
from vlm_batch.types import Event, FinishReason

#: Clients beyond twice those with rows that are remembered for when they had a place.
MOST_REMEMBERED = 4


class Rows:
    """All rows of an engine: the ledger, and the slots of the rows that decode."""

    def __init__(
        self,
        batch: DecodeGroups,
        capacity: Capacity,
        memory: RowMemory,
        reuse: Reuse,
        ageing_seconds: float,
    ) -> None:
        self.ledger = Ledger(
            lambda row: row.clock.submitted - row.priority * ageing_seconds
        )
        self.batch = batch
        self.events: list[Event] = []
        self._capacity = capacity
        self._memory = memory
        self._reuse = reuse
        self._ageing_seconds = ageing_seconds
        self._served: dict[int, float] = {}  # when each client last had a place

    # Look-ups

    @property
    def is_active(self) -> bool:
        """Whether a row is beyond its preparation."""
        return len(self.ledger) > self.ledger.num(*AHEAD)

    @property
    def is_decoding(self) -> bool:
        """Whether a row waits for its next token."""
        return bool(self._awaited())

    @property
    def is_heard(self) -> bool:
        """Whether somebody waits for the next token of a row. Options are told once all are scored."""
        return any(row.answer.path is None for row in self._awaited())

    def _awaited(self) -> list[Row]:
        """Return the rows that wait for their next tokens, or for their forms to let one be told."""
        last = [row for row in self.ledger.at(Stage.LAST) if row.is_untold]
        return [*self.ledger.at(Stage.DECODE, Stage.READY), *last]

    @property
    def num_pending(self) -> int:
        """Prompt tokens left of rows with places."""
        return sum(
            row.facts.length - row.prompt.prefilled
            for row in self.ledger.at(Stage.PREFILL)
        )

    @property
    def num_free(self) -> int:
        """Free places. Rows that were parked for a late mask keep theirs; those that gave way do not."""
        taken = self.ledger.num(Stage.PREFILL, Stage.DECODE)
        for row in self.ledger.at(Stage.READY):
            taken += row.is_untold and row.prompt.logits is not None
        return max(0, self._capacity.num_places - taken)

    @property
    def input_bytes(self) -> int:
        """Bytes kept to recompute rows from. Thread-safe."""
        return sum(num_bytes(row.given) for row in self.ledger.tuple_at(*Stage))

    def untold(self) -> list[Row]:
        """Return the rows whose forms still check their last token."""
        return [row for row in self._awaited() if row.is_untold]

    def live(self) -> list[Row]:
        """Return the rows with places, the last in line at the end."""
        urgency = self.ledger.urgency
        rows = sorted(self.ledger.at(Stage.DECODE, Stage.PREFILL), key=urgency)
        return list(in_turn(by_client(rows), urgency, {}))

    def parked(self) -> list[Row]:
        """Return the rows that have lost their places to others, with their caches."""
        found: list[Row] = []
        for row in self.ledger.at(Stage.READY):
            if row.answer.num_sampled and not row.is_untold:
                found.append(row)
        return found

    def in_line(self, rows: Iterable[Row]) -> list[Row]:
        """Return rows that wait in the order in which they get places."""
        lines = by_client(sorted(rows, key=self.ledger.urgency))
        clients = self.clients()
        turn = lambda row: clients.turn(waiting(row))  # noqa: E731
        return list(in_turn(lines, turn, clients.placed))

    def clients(self) -> Clients:
        """Return who asks, who has places, and since when."""
        now = time.perf_counter()
        placed, asked = self.ledger.placed(), self.ledger.asked
        self._served.update(dict.fromkeys(placed, now))
        if len(self._served) > 2 * len(asked) + MOST_REMEMBERED:
            there = self._served.keys() & asked.keys()
            self._served = {client: self._served[client] for client in there}
        return Clients(now, self._ageing_seconds, placed, asked, self._served)

    # Moves

    def add(self, row: Row) -> None:
        """Queue a new row. Raises ValueError for an id in use."""
        self.ledger.add(row, Stage.PREPARED if row.prompt.inputs else Stage.INBOX)

    def place(self, row: Row) -> None:
        """Give an encoded row a place."""
        self.ledger.move(row, Stage.PREFILL)
        row.clock.note_place()

    def end_prefill(self, row: Row, logits: mx.array) -> None:
        """Note a prefilled row's logits (1, V). Siblings become rows of their own. Raises InvalidParameters.

        A row that asks for no token frees its place and caches. It ends once its work was read.
        """
        if not row.params.max_tokens:
            row.answer.ending = Ending(Event(row.request_id), "length", None)
            row.prompt = Prompt()
            self.ledger.move(row, Stage.LAST)
            return
        size = row.facts.vocabulary or logits.shape[-1]
        check_within("stop_token_ids", row.params.stop_token_ids, size)
        row.prompt.logits = logits
        siblings: Sequence[Row] = ()
        if row.answer.path is not None:
            siblings = begin_options(row, row.answer.path, logits.shape[-1])
            self.ledger.asked[row.client] += len(siblings)
        elif row.siblings:
            fork(row, row.siblings)
            siblings, row.siblings = row.siblings, ()
        for sibling in siblings:
            self.ledger.add(sibling, Stage.READY)
        self.ledger.move(row, Stage.READY)

    def join(self, row: Row, others: int) -> None:
        """Move a ready row to the batch; free its embeddings. ``others``: rows that take places next.

        One whose next token is its last leaves at once, and takes no place.
        """
        needs_place = row.needs_place
        caches, row.prompt = row.prompt.cache, Prompt()
        if caches:
            self._memory.learn(caches, row.facts.length + row.answer.num_fed)
        if needs_place:
            self.batch.join(row, caches, others)
        else:
            row.prompt = Prompt(cache=caches)
        self.ledger.move(row, Stage.DECODE)

    def park(self, row: Row, logits: mx.array | None = None) -> None:
        """Preempt a decoding row, with its caches.

        Args:
            logits: (1, V), of its last forward, if no token was chosen from them.
        """
        cache = self.batch.take(row)
        row.prompt = Prompt(cache=cache, prefilled=row.facts.length, logits=logits)
        self.ledger.move(row, Stage.READY)

    def leave(self, row: Row) -> None:
        """Free the place of a row whose last work is launched; keep its caches if wanted."""
        left: list[Any] = []
        if self._reuse.wants_caches(row):
            with keeping(row):
                left = self.batch.take(row)
        self.batch.leave(row)
        row.prompt = Prompt(cache=left)
        self.ledger.move(row, Stage.LAST)

    def put_back(self, row: Row) -> None:
        """Have a row computed again."""
        self.batch.leave(row)
        row.begin_again()
        self.ledger.move(row, Stage.PREPARED)

    def finish(self, row: Row, ending: Ending) -> None:
        """End a complete row. Raises if the user's cache cannot be saved."""
        row.answer.ending = ending
        # of an answer without tokens: its end
        row.clock.note_token()
        if row.stage is not Stage.LAST:
            self.leave(row)
        cache = self._reuse.end(row)
        result = row.result(ending.reason, ending.stop_reason, cache=cache)
        self._capacity.end()
        self.events.append(replace(ending.event, result=result))
        self.forget(row)

    def end(
        self, row: Row, reason: FinishReason, error: BaseException | None = None
    ) -> None:
        """End an incomplete row, and its siblings."""
        has_decoded = row.answer.num_sampled > 0
        cache = None
        if reason == "cancelled" and has_decoded:
            # cancelled, even if its caches are lost
            with contextlib.suppress(Exception):
                if row.stage is not Stage.LAST:
                    self.leave(row)
                cache = self._reuse.end(row)
        if error is not None:
            let_go(error)
        if row.answer.ending is not None:
            self.events.append(row.answer.ending.event)
        self.events.append(
            Event(row.request_id, result=row.result(reason, error=error, cache=cache))
        )
        for sibling in row.siblings:
            self.events.append(
                Event(sibling.request_id, result=sibling.result(reason, error=error))
            )
            sibling.clear()
        if has_decoded:
            self._capacity.end()
        self.forget(row)

    def forget(self, row: Row) -> None:
        """Take an ended row out of everything."""
        self.batch.leave(row)
        self.ledger.move(row, Stage.ENDED)
        row.prompt.loading.cancel()
        if row.reuse.continues is not None:  # its user's cache was not used
            row.reuse.continues.release()
        row.clear()

    def tell(self) -> list[Event]:
        events, self.events = self.events, []
        return events


def without_place(rows: Iterable[Row]) -> list[Row]:
    """Return the rows whose next token is their last: they join and leave in one step, and need no place."""
    return [row for row in rows if not row.needs_place]


def at_ready(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that have logits to choose from, and nothing that ended them."""
    return [row for row in rows if row.stage is Stage.READY]


def waiting(row: Row, *, waits: bool = False) -> WaitingRow:
    """Return what the schedule sees of a waiting row."""
    return WaitingRow(
        row.request_id,
        row.client,
        row.priority,
        row.clock.submitted,
        tokens(row),
        row.stage is Stage.PREPARED,
        row.stage is Stage.READY,
        waits,
        row.facts.length - row.prompt.prefilled,
    )
