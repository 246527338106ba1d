"""Asks the schedule, with what it may know of the rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from vlm_batch.engine import schedule
from vlm_batch.engine.ledger import WAITING
from vlm_batch.engine.memory import RowMemory, tokens
from vlm_batch.engine.pace import Pace
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Row, Stage
from vlm_batch.engine.rows import Rows, waiting
from vlm_batch.engine.runner import Runner, picture_bytes
from vlm_batch.engine.work import Work
from vlm_batch.policy import Policy


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

    def decode(self) -> schedule.DecodePlan:
        """Plan who of the live rows goes on."""
        has_grown = self._memory.is_look_due()
        clients = self._rows.clients()
        may_yield = len(clients.asked) > 1 and self._ledger.num(*WAITING) > 0
        if not (has_grown or may_yield):
            return schedule.ALL_GO_ON
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
        )
        return schedule.decode(view)

    def prompts(self, seconds: float) -> schedule.Prompts:
        """Plan who gets a free place and who is encoded next. ``seconds``: spent on encoding in this step."""
        if not self._ledger.num(*WAITING):
            return schedule.NO_PROMPTS
        has_encoded = seconds > 0
        free, ahead = self._rows.num_free, self._policy.encode_ahead
        placed = self._ledger.at(Stage.PREFILL, Stage.DECODE)
        ready = self._ledger.at(Stage.READY)
        view = schedule.PromptsView(
            clients=self._rows.clients(),
            lines=self._lines(free + ahead),
            live=[tokens(row) for row in placed],
            held={row.request_id: tokens(row) for row in ready},
            free=free,
            ahead=ahead,
            most_encoded=partial(
                schedule.most_encoded,
                self._policy,
                is_decoding=self._rows.is_decoding,
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
        rows = self._runner.views(now)
        budget = self._pace.budget(
            self._rows.is_decoding,
            self._rows.num_pending,
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
                may_wait = row.stage is Stage.PREPARED and bool(others)
                waits = may_wait and self._reuse.waits_for(row, others)
                line.append(waiting(row, waits=waits))
                left -= not waits
            lines[client] = line
        return lines

    def _may_encode(self, request_id: str) -> bool:
        """Return whether the encoder has room for a row's pictures beside other rows."""
        return self._runner.encoding.fits(picture_bytes(self._ledger[request_id]))


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
