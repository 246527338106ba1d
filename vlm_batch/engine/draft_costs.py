"""The gain of a draft, and its cost.

A forward with drafts takes longer and may say more tokens. It pays by this factor:

    gain = (rows + expected) / rows * seconds without drafts / seconds with them

``expected``: of n drafted tokens that each hold at rate r, r + r**2 + ... + r**n (``Expectation``). A rate is measured for
each source, by row; a row begins with that of all rows. ``seconds``: the median of the last five forwards of that many
positions, and a line between measured numbers (``StepSeconds``); a model's own drafting is added. Rows draft as many
tokens as have the greatest gain, each up to where its draft becomes too unlikely. Below a gain of 1.2 nobody drafts, since
to read tokens before the next launch costs time, too; once they are read, 1.05 is enough. After 16 refusals, then 32, 64
and so on, larger forwards are measured again: the device may have been busy.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

#: Least gain for which rows draft: less is within the error of the estimates.
LEAST_GAIN = 1.2
#: The same once tokens have been read: what is left to lose is the forward's time.
LEAST_GAIN_READ = 1.05


class StepSeconds:
    """Median seconds of forwards by rows, to three binary digits. Unmeasured ones get low estimates."""

    #: Forwards of a size that are kept: by their median one slow forward decides nothing.
    KEPT = 5
    #: Assumed cost of a further row, relative to a row of the largest measured forward.
    SLOPE = 0.3
    #: Largest forward that is tried, as a multiple of the largest measured one.
    REACH = 4

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}

    @property
    def sizes(self) -> set[int]:
        """Measured numbers of rows."""
        return set(self._medians)

    def record(self, rows: int, seconds: float) -> None:
        """Record a forward. One of a size is no measure: it may build kernels."""
        size = _rounded(rows)
        samples = self._samples.setdefault(size, deque(maxlen=self.KEPT))
        samples.append(seconds)
        if len(samples) > 1:
            self._medians[size] = sorted(samples)[(len(samples) - 1) // 2]

    def forget(self, rows: int) -> None:
        """Forget larger forwards, so that the next draft tries them."""
        larger = [size for size in self._medians if size > rows]
        for size in larger:
            del self._medians[size]
            last = self._samples[size][-1]
            self._samples[size] = deque([last], maxlen=self.KEPT)

    def of(self, rows: int) -> float | None:
        """Return estimated seconds, or None."""
        rows, medians = _rounded(rows), self._medians
        sizes = sorted(medians)
        if not sizes or rows > self.REACH * sizes[-1]:
            return None
        at = bisect_left(sizes, rows)
        if rows in medians:  # a larger forward that was faster tells more
            return min(map(medians.__getitem__, sizes[at:]))
        if at == 0:
            return medians[sizes[0]]
        low = sizes[at - 1]
        if at == len(sizes):
            return medians[low] * (1 + self.SLOPE * (rows / low - 1))
        high = sizes[at]
        share = (rows - low) / (high - low)
        return medians[low] + share * (medians[high] - medians[low])


def _rounded(rows: int) -> int:
    """Round up to three binary digits."""
    step = 1 << max(0, rows.bit_length() - 3)
    return -(-rows // step) * step


class StepClock:
    """Measures forwards from reading to reading, where nothing else ran beside them."""

    def __init__(self, seconds: StepSeconds) -> None:
        self._seconds = seconds
        self._positions = 0  # of the last forward, if it can be timed
        self._was_read = 0.0  # when the one before was read
        self._elsewhere = 0.0  # seconds since then in which the model drafted
        self._plain = 0  # positions of a forward that waited, if nobody drafts in it
        self._is_usual = True  # the last forward did not wait, or has drafts

    def waits(self, positions: int) -> None:
        """Note that the next forward waits for its rows' tokens; without drafts it has ``positions``."""
        self._plain = positions

    def drafted(self, seconds: float) -> None:
        """Note the seconds of the model that drafts."""
        self._elsewhere += seconds

    def launched(self, positions: int) -> None:
        """Note a forward's positions; 0 if other work ran beside it."""
        self._positions = positions
        self._is_usual = positions != self._plain
        self._plain = 0

    def was_read(self) -> None:
        """Record the last forward: it took the time since the one before was read."""
        now = time.perf_counter()
        positions, before = self._positions, self._was_read
        can_tell = positions > 0 and self._is_usual
        if can_tell and before:
            self._seconds.record(positions, now - before - self._elsewhere)
        self._was_read = now if positions else 0.0
        self._positions, self._elsewhere = 0, 0.0


@dataclass(frozen=True)
class Expectation:
    """A draft of up to ``most`` tokens; each is accepted at ``rate`` after the one before, the first at ``sure_rate``."""

    source: str
    most: int
    rate: float
    longest: float = math.inf  # as far as is known
    of_all: float = 1.0  # the rate of the draft as a whole
    num_sure: int = 0  # its first tokens, which a form forces
    sure_rate: float = 1.0

    def within(self, size: int, floor: float) -> int:
        """Return the draft's length, at most ``size``: tokens accepted at ``floor`` or more."""
        likely = self.of_all * self.sure_rate**self.num_sure / floor
        more = 0.0
        if likely > 1 and self.rate > 0:
            more = math.log(likely) / -math.log(min(self.rate, 0.99))
        return min(size, self.most, self.num_sure + int(more))

    def tokens(self, count: int) -> float:
        """Return the expected number of accepted tokens of ``count``."""
        most = max(0.0, min(count, self.longest))
        sure = min(most, self.num_sure)
        rest = float(self.sure_rate**sure) * _expected(self.rate, most - sure)
        return self.of_all * (_expected(self.sure_rate, sure) + rest)


def _expected(rate: float, count: float) -> float:
    """Return the expected accepted tokens of ``count``, each accepted at ``rate``."""
    rate = min(rate, 0.99)
    return float(rate * (1 - rate**count) / (1 - rate))
