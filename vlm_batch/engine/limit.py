"""The number of rows that may live: by measured steps, and by memory."""

from __future__ import annotations

import math
import statistics

from vlm_batch.policy import Policy

#: Numbers of rows that are tried, in order.
LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class RowLimit:
    """Finds the number of ``rows`` at which a step costs least per row.

    While others wait, it tries the next number of ``LADDER`` and compares medians of ``STEPS`` steps. It stays if the
    cost per row falls by ``GAIN``, else goes back for ``PATIENCE`` steps, each time twice as many. Below ``first`` it
    goes only after a ``LOSS``. Steps over ``gap`` seconds stop its growth.
    """

    STEPS = 8
    GAIN = 0.08
    LOSS = 0.08
    PATIENCE = 128
    #: Steps after which a time is out of date, since rows have grown.
    STALE = 1024

    def __init__(self, first: int, most: int, *, gap: float = 0.1) -> None:
        if not 1 <= first <= most:
            raise ValueError(
                f"first is {first} and most {most}; it must be 1 <= first <= most"
            )
        lower = [rows for rows in LADDER if rows < most]
        self._ladder = tuple(sorted({first, most, *lower}))
        self._first = first
        self._gap = gap
        self.most = most
        self.rows = first
        self._times: list[float] = []  # of the last steps with ``_at`` rows
        self._at = 0
        # by number of rows: (median seconds, step of the measurement)
        self._known: dict[int, tuple[float, int]] = {}
        self._count = 0
        self._patience = self.PATIENCE
        self._rests_until = 0

    def record(self, rows: int, seconds: float, *, are_waiting: bool = True) -> None:
        """Record a step that only decoded."""
        self._count += 1
        if rows != self._at:
            self._at, self._times = rows, []
        self._times.append(seconds)
        if len(self._times) < self.STEPS:
            return
        self._known[rows] = (statistics.median(self._times), self._count)
        self._times = []
        if rows == self.rows:
            self._judge(are_waiting)

    def _judge(self, are_waiting: bool) -> None:
        """Shrink if this number does not pay, else grow if rows wait."""
        rung = self._ladder.index(self.rows)
        here = self._share(self.rows)
        worst = 1 + self.LOSS
        if self.rows > self._first:
            worst = 1 - self.GAIN
        if rung and here > self._share(self._ladder[rung - 1]) * worst:
            self._rests_until = self._count + self._patience
            self._patience *= 2
            self.rows = self._ladder[rung - 1]
            return
        if not are_waiting or self.rows >= self.most:
            return
        is_slow = here * self.rows > self._gap
        if is_slow or self._count < self._rests_until:
            return
        self.rows = self._ladder[rung + 1]
        self._known.pop(self.rows, None)  # it is measured anew

    def _share(self, rows: int) -> float:
        """Return seconds per row; infinity if unknown or out of date."""
        seconds, when = self._known.get(rows, (0.0, -self.STALE))
        is_stale = self._count - when >= self.STALE
        return math.inf if is_stale else seconds / rows


class Capacity:
    """The number of places: ``most_rows``, fewer after memory ran out or by ``limit``."""

    def __init__(self, policy: Policy) -> None:
        self.most_rows = policy.max_rows or policy.most_rows
        #: None where it is said how many rows may live.
        self.limit: RowLimit | None = None
        if not policy.max_rows:
            first, gap = policy.first_rows, policy.token_gap
            self.limit = RowLimit(first, self.most_rows, gap=gap)
        self.most_live = self.most_rows
        #: Whether the system is short of memory, and the most places meanwhile.
        self.is_short = False
        self.ceiling = self.most_rows
        self._is_plain = False  # whether the last step only decoded
        self._ended = 0  # rows that ended since ``most_live`` changed

    @property
    def num_places(self) -> int:
        most = min(self.most_live, self.ceiling)
        return most if self.limit is None else min(most, self.limit.rows)

    def pause(self) -> None:
        """Note a step without a forward: the next one is not timed."""
        self._is_plain = False

    def record(
        self, rows: int, seconds: float, tokens: int, *, are_waiting: bool
    ) -> None:
        """Record a step. The limit counts decode-only steps that follow another."""
        was_plain, self._is_plain = self._is_plain, not tokens
        if self.limit is None or tokens or not was_plain:
            return
        may_grow = are_waiting and self.most_live > self.limit.rows
        self.limit.record(rows, seconds, are_waiting=may_grow)

    def run_out(self, num_live: int) -> None:
        """Record that so many rows did not fit."""
        self.most_live, self._ended = max(1, min(self.most_live, num_live) - 1), 0

    def end(self) -> None:
        """Record a live row's end. A lowered ``most_live`` grows by one after that many."""
        if self.most_live == self.most_rows:
            return
        self._ended += 1
        if self._ended >= self.most_live:
            self.most_live, self._ended = self.most_live + 1, 0
