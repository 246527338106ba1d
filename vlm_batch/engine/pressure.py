"""A guard against a system that runs out of memory: other programs take theirs while rows run.

MLX raises where an allocation fails, and ``Retry`` sees to that. A Mac seldom fails one: it compresses, swaps, and ends
programs. So the guard looks at the system's own figures. What it does is undone once memory is back, and one row always
goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from vlm_batch.engine.limit import Capacity
from vlm_batch.engine.retry import Retry
from vlm_batch.engine.rows import Rows
from vlm_batch.runtime.available import Available, available
from vlm_batch.runtime.memory import release_memory
from vlm_batch.store.budget import ByteBudget

logger = logging.getLogger(__name__)

#: Seconds between two looks.
EVERY = 0.5
#: Times the least share that must be free before rows come back.
ENOUGH = 1.5
#: Most bytes that are to stay free, however large the memory.
MOST_FREE = 4 << 30
#: Looks between two returns of free memory while pressure stays.
RETURNS = 20


class MemoryGuard:
    """Lets fewer rows live while the system is short of memory. Engine's thread only, but for ``pressed``.

    At the first look it gives freed arrays back, and no row begins beside those that live. At the second it drops what
    is kept for later requests. From the third on half of the rows begin again later, down to one.

    Args:
        least: share of the memory that is to stay free; 0 does not look.
        kept: memory for later requests.
    """

    def __init__(
        self,
        rows: Rows,
        capacity: Capacity,
        retry: Retry,
        kept: ByteBudget,
        least: float,
    ) -> None:
        self._rows = rows
        self._capacity = capacity
        self._retry = retry
        self._kept = kept
        self._least = least
        # the system's figures; None if unknown
        self.read: Callable[[], Available | None] = available
        self.clock: Callable[[], float] = time.monotonic
        self._next = 0.0  # time of the next look
        self._looks = 0  # since the pressure began
        self._since = 0.0

    @property
    def pressed(self) -> float:
        """Seconds since memory became short; 0 while it is not."""
        return self.clock() - self._since if self._capacity.is_short else 0.0

    def step(self) -> None:
        """Look, if it is time."""
        now = self.clock()
        if not self._least or now < self._next:
            return
        self._next = now + EVERY
        figures = self.read()
        if figures is None:
            return
        least = min(self._least * figures.total, MOST_FREE)
        if not figures.has(least):
            self._press(figures, now)
        elif self._capacity.is_short and figures.has(ENOUGH * least):
            self._relax(figures)

    def _press(self, figures: Available, now: float) -> None:
        live = self._rows.live()
        self._looks += 1
        if not self._capacity.is_short:
            self._since = now
            self._capacity.is_short = True
            self._say("is short of memory", figures)
        if self._looks == 1:
            self._capacity.ceiling = max(1, len(live))
            release_memory()
            return
        self._kept.clear()
        has_left = False
        if self._looks > 2:
            ceiling = max(1, len(live) // 2)
            self._capacity.ceiling = ceiling
            has_left = self._begin_later(ceiling)
        if has_left or self._looks % RETURNS == 2:
            release_memory()

    def _begin_later(self, ceiling: int) -> bool:
        """Have the last rows in line begin again later, and those that are parked. Returns whether there were any."""
        rows = [*self._rows.live(), *self._rows.parked()]
        # a row whose inputs are gone could not begin again
        last = [row for row in rows[ceiling:] if row.given]
        for row in last:
            self._retry.outgrow(row)
        return bool(last)

    def _relax(self, figures: Available) -> None:
        """Let twice as many rows live; all of them at last."""
        capacity = self._capacity
        self._looks = 0
        capacity.ceiling = min(2 * capacity.ceiling, capacity.most_rows)
        if capacity.ceiling < capacity.most_rows:
            return
        capacity.is_short = False
        self._say("has memory again", figures)

    def _say(self, what: str, figures: Available) -> None:
        num_live = len(self._rows.live())
        logger.warning(
            "the system %s: %.1f of %.1f GB are free%s; %d rows live, %d wait",
            what,
            figures.nbytes / 1e9,
            figures.total / 1e9,
            " (critical)" if figures.is_critical else "",
            num_live,
            len(self._rows.ledger) - num_live,
        )
