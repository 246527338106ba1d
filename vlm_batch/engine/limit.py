"""The number of rows that may live at a time, found from the times of decode steps. Integers and seconds only."""

from __future__ import annotations

import statistics

#: Numbers of rows that are tried, one after another.
LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class RowLimit:
    """Grows from ``first`` rows while more of them make a step cheaper for each, and gives back what does not pay.

    It is fed with the steps that did nothing but decode (``record``), and asked for ``rows``. When as many rows decode as
    may live, and others wait, it tries the next number of ``LADDER``: there the median of ``STEPS`` steps is compared with
    what they took before. A row's share of a step must fall by ``GAIN``, or the number before is taken again; the next try
    comes after ``PATIENCE`` steps, and after twice as many each time that it failed. Below ``first`` it goes only where a
    row's share has grown by ``LOSS``. It does not grow where a step takes longer than ``gap`` seconds, or rows that live
    would have to begin again for want of memory. It changes who waits and no answer.
    """

    STEPS = 8
    GAIN = 0.08
    LOSS = 0.08
    PATIENCE = 128
    #: Steps after which a time says nothing any more: rows have become longer meanwhile.
    STALE = 1024

    def __init__(self, first: int, most: int, *, gap: float = 0.1) -> None:
        if not 1 <= first <= most:
            raise ValueError(f"first is {first} and most {most}; it must be 1 <= first <= most")
        self._ladder = tuple(sorted({first, most, *(rows for rows in LADDER if rows < most)}))
        self._first = first
        self._gap = gap
        self.most = most
        self.rows = first
        self._times: list[float] = []  # of the last steps at one number of rows
        self._at = 0
        self._known: dict[int, tuple[float, int]] = {}  # by number of rows: the median of a step, and when that was
        self._count = 0
        self._patience = self.PATIENCE
        self._rests_until = 0

    def record(self, rows: int, seconds: float, *, are_waiting: bool = True) -> bool:
        """Take note of a step that decoded so many rows and did nothing else; True if ``rows`` has changed.

        ``are_waiting``: others are ready and could have a place now.
        """
        self._count += 1
        if rows != self._at:
            self._at, self._times = rows, []
        self._times.append(seconds)
        if len(self._times) < self.STEPS:
            return False
        self._known[rows] = (statistics.median(self._times), self._count)
        self._times = []
        return rows == self.rows and self._judge(are_waiting)

    def _judge(self, are_waiting: bool) -> bool:
        """Shrink where this number of rows does not pay, or else grow where others wait."""
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
                return True
        is_slow = here * self.rows > self._gap
        if not are_waiting or self.rows == self.most or is_slow or self._count < self._rests_until:
            return False
        self.rows = self._ladder[place + 1]
        self._known.pop(self.rows, None)  # it is measured anew
        return True

    def _share(self, rows: int) -> float | None:
        """A row's share of a step of so many; None if that is not known, or was long ago."""
        seconds, when = self._known.get(rows, (0.0, -self.STALE))
        return seconds / rows if self._count - when < self.STALE else None
