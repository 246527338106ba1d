"""The limit of live rows, from measured steps."""

from __future__ import annotations

import statistics

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
        self._ladder = tuple(
            sorted({first, most, *(rows for rows in LADDER if rows < most)})
        )
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
        place = self._ladder.index(self.rows)
        here = self._share(self.rows)
        assert here is not None
        below = self._share(self._ladder[place - 1]) if place else None
        if below is not None:
            worst = 1 - self.GAIN if self.rows > self._first else 1 + self.LOSS
            if here > below * worst:
                self._rests_until = self._count + self._patience
                self._patience *= 2
                self.rows = self._ladder[place - 1]
                return
        is_slow = here * self.rows > self._gap
        if (
            are_waiting
            and self.rows < self.most
            and not is_slow
            and self._count >= self._rests_until
        ):
            self.rows = self._ladder[place + 1]
            self._known.pop(self.rows, None)  # it is measured anew

    def _share(self, rows: int) -> float | None:
        """Return seconds per row; None if unknown or out of date."""
        seconds, when = self._known.get(rows, (0.0, -self.STALE))
        return seconds / rows if self._count - when < self.STALE else None
