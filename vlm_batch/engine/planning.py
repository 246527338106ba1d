"""Asks the schedule, with what it may know of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from vlm_batch.engine import schedule
from vlm_batch.engine.ledger import PLACED, WAITING
from vlm_batch.engine.memory import RowMemory, tokens
from vlm_batch.engine.pace import Pace
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Row, Stage
from vlm_batch.engine.rows import Rows, waiting
from vlm_batch.engine.runner import Runner, picture_bytes
from vlm_batch.engine.work import Work
from vlm_batch.policy import Policy

#: Stages of rows that may wait for their first token and for nothing else, but places and memory.
ARRIVED = (Stage.PREPARED, Stage.ENCODED, *PLACED, Stage.READY, Stage.LAST)


class Planner:
    """Makes views of the rows, and plans of the views."""

    def __init__(
        self,
        rows: Rows,
        runner: Runner,
        memory: RowMemory,
        reuse: Reuse,
        pace: Pace,
        policy: Policy,
    ) -> None:
        self._rows = rows
        self._ledger = rows.ledger
        self._runner = runner
        self._memory = memory
        self._reuse = reuse
        self._pace = pace
        self._policy = policy
        self._resting, self.is_still = schedule.NOBODY, False
        self._rested = 0.0  # seconds that clients have rested more than not
        self._looked_at = self._decoded_at = 0.0

    def decode(self) -> schedule.DecodePlan:
        """Plan who of the live rows goes on."""
        has_grown = self._memory.is_look_due()
        clients = self._rows.clients()
        self._note_rest(clients.now)
        if not has_grown and len(clients.asked) < 2:
            return self._follow(schedule.ALL_GO_ON, clients.now)
        rows = self._new_rows() if self._may_rest else ()
        new = [self._new(row, clients) for row in rows]
        if not (has_grown or new or self._ledger.num(*WAITING)):
            return self._follow(schedule.ALL_GO_ON, clients.now)
        ready = self._ledger.at(Stage.READY)
        view = schedule.DecodeView(
            clients=clients,
            lines=self._lines(self._policy.encode_ahead),
            live=[_live(row) for row in self._rows.live()],
            held={row.request_id: tokens(row) for row in ready},
            free=self._rows.num_free,
            ahead=self._policy.encode_ahead,
            has_grown=has_grown,
            fits=self._memory.fits,
            new=new,
            decoding=self._decoding(),
            may_be_still=clients.now - self._decoded_at < self._pace.longest_rest,
        )
        return self._follow(schedule.decode(view), clients.now)

    @property
    def _may_rest(self) -> bool:
        return self._rested < schedule.MOST_RESTED

    def rest_for(self, callers: Sequence[int]) -> None:
        """Have others rest from here on for the clients from whom something has come."""
        if not callers or not self._may_rest:
            return
        clients = self._rows.clients()
        for client in set(callers):
            places = clients.placed.get(client, 0)
            self._resting |= clients.resting(client, places)

    def rests(self, work: Work) -> bool:
        """Return whether all whose prompts these are rest by now."""
        rows = filter(None, map(self._ledger.get, work.rows))
        return {row.client for row in rows} <= self._resting

    def _note_rest(self, now: float) -> None:
        """Count the time since the last plan."""
        seconds = now - self._looked_at
        if not self._resting:
            seconds = -seconds
        self._rested = max(0.0, self._rested + seconds)
        self._looked_at = now

    def _follow(self, plan: schedule.DecodePlan, now: float) -> schedule.DecodePlan:
        self._resting, self.is_still = plan.resting, plan.is_still
        if not plan.is_still:
            self._decoded_at = now
        return plan

    def _new_rows(self) -> list[Row]:
        """Return the rows that wait for their first tokens, and for which others may rest."""
        found: list[Row] = []
        others = self._ledger.at(Stage.PREFILL, Stage.ENCODED)
        for row in self._ledger.at(Stage.PROCESSING, *ARRIVED):
            if row.client < 0 or row.clock.first_token:
                continue
            # for the prompt of one that would rest
            if not self._waits(row, others):
                found.append(row)
        return found

    def _waits(self, row: Row, others: Sequence[Row]) -> bool:
        """Return whether a row waits for the beginning of its prompt that another will leave."""
        if row.stage is not Stage.PREPARED or not others:
            return False
        return self._reuse.waits_for(row, others)

    def _new(self, row: Row, clients: schedule.Clients) -> schedule.NewRow:
        has_length = row.stage in (Stage.ENCODED, Stage.READY)
        return schedule.NewRow(
            row.request_id,
            row.client,
            clients.placed.get(row.client, 0) - (row.stage in PLACED),
            is_coming=row.stage is Stage.PROCESSING and not _is_quick(row),
            waits=row.stage in WAITING,
            wanted=tokens(row) if has_length else 0,
            may_encode=row.stage is not Stage.PREPARED
            or self._may_encode(row.request_id),
        )

    def _decoding(self) -> frozenset[int]:
        """Return the clients of rows that wait for further tokens."""
        rows = self._ledger.at(Stage.DECODE)
        return frozenset(row.client for row in rows if row.clock.first_token)

    def prompts(self, seconds: float) -> schedule.Prompts:
        """Plan who gets a free place and who is encoded next. ``seconds``: spent on encoding in this step."""
        if not self._ledger.num(*WAITING):
            return schedule.NO_PROMPTS
        has_encoded = seconds > 0
        free, ahead = self._rows.num_free, self._policy.encode_ahead
        is_full = not free and self._ledger.num(Stage.ENCODED) >= ahead
        if is_full and len(self._ledger.asked) < 2:
            return schedule.NO_PROMPTS  # as in most steps of a full batch
        lines = self._lines(free + ahead)
        for client in self._resting:
            lines.pop(client, None)
        placed = self._ledger.at(Stage.PREFILL, Stage.DECODE)
        ready = self._ledger.at(Stage.READY)
        view = schedule.PromptsView(
            clients=self._rows.clients(),
            lines=lines,
            live=[tokens(row) for row in placed],
            held={row.request_id: tokens(row) for row in ready},
            free=free,
            ahead=ahead,
            most_encoded=partial(
                schedule.most_encoded,
                self._policy,
                is_decoding=self._rows.is_heard,
                seconds=seconds,
                has_encoded=has_encoded,
            ),
            pending=self._rows.num_pending,
            has_encoded=has_encoded,
            may_encode=self._may_encode,
            fits=self._memory.fits,
        )
        plan = schedule.prompts(view)
        if len(plan.encoded) < 2:
            return plan
        rows = [self._ledger[name] for name in plan.encoded]
        others = self._ledger.at(Stage.PREFILL, Stage.ENCODED)
        together = self._reuse.new_ones(rows, others)
        return replace(plan, encoded=tuple(row.request_id for row in together))

    def chunks(self, now: float, encoding: float) -> tuple[Work, ...]:
        """Plan chunks of prompts. ``encoding``: seconds that this step has spent on it."""
        rows = [
            row for row in self._runner.views(now) if row.client not in self._resting
        ]
        if self.is_still:
            budget = self._pace.beside_resting()
        else:
            budget = self._pace.budget(
                self._rows.is_heard,
                sum(row.length - row.done for row in rows),
                max((row.waited for row in rows), default=0.0),
                encoding,
            )
        return schedule.chunks(rows, budget, self._policy)

    def _lines(self, most: int) -> dict[int, list[schedule.WaitingRow]]:
        """Return the first ``most`` rows of each client that wait for nothing but a place, and those among them."""
        others = self._ledger.at(Stage.PREFILL, Stage.ENCODED)
        lines: dict[int, list[schedule.WaitingRow]] = {}
        for client, rows in self._ledger.lines().items():
            line: list[schedule.WaitingRow] = []
            left = most
            for row in rows:
                if row.stage is Stage.READY:
                    if not row.is_untold:
                        line.append(waiting(row))
                    continue
                if not left:
                    break
                waits = self._waits(row, others)
                line.append(waiting(row, waits=waits))
                left -= not waits
            lines[client] = line
        return lines

    def _may_encode(self, request_id: str) -> bool:
        """Return whether the encoder has room for a row's pictures beside other rows."""
        return self._runner.encoding.fits(picture_bytes(self._ledger[request_id]))


def _is_quick(row: Row) -> bool:
    """Return whether a row's processor mostly takes less than a step: it has no media, and no form to compile."""
    return row.params.form is None and row.prompt.loading.known_nbytes == 0


def _live(row: Row) -> schedule.LiveRow:
    is_decoding = row.stage is Stage.DECODE
    return schedule.LiveRow(
        row.request_id,
        row.client,
        row.priority,
        row.clock.submitted,
        tokens(row),
        is_decoding and not (row.is_suspect or row.answer.drafter.ahead),
        row.gave_way,
    )
