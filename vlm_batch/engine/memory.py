"""Bytes that rows take: keys and values while they live, and the encoder's work on their pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.caches.layers import row_bytes
from vlm_batch.engine.row import Row
from vlm_batch.engine.trial import Trial
from vlm_batch.errors import DoesNotFit
from vlm_batch.runtime.memory import begin_peak

#: Lengths at which a row's bytes are noted, to be read off between them.
LENGTHS = tuple(1 << power for power in range(4, 21))
#: Steps between two looks at whether rows have grown beyond the bound.
GROWTH = 16
#: Steps after which an encoding is done, whatever it was launched behind.
STEPS_OF_ENCODING = 2
#: Tokens of a made-up prompt: so many that what is allocated in steps counts as it does later.
PROBE = 256


class RowMemory:
    """Bytes of live rows under a bound. A row's bytes are known before it enters: from ``probe``, and from rows that were
    prefilled. ``slabs`` gives (places, tokens) of what rows of so many tokens take together.

    ``check_length`` may be called from any thread, the rest belongs to the engine's.
    """

    def __init__(self, max_bytes: int | None, slabs: Callable[[Sequence[int]], Sequence[tuple[int, int]]]) -> None:
        self.max_bytes = max_bytes
        self._slabs = slabs
        #: Bytes at each of LENGTHS; of rows with pictures of their own layers, the most seen.
        self._at: tuple[int, ...] = ()
        self._is_probed = False  # by a prompt without pictures, and not by a row

    def probe(self, trial: Trial) -> None:
        """Learn what a row takes from the shapes of a short prompt's caches, of which nothing is computed.

        A family that takes no prompt without a picture is learned from its first row.
        """
        if self.max_bytes is None:
            return
        try:
            _, caches, seen = trial.prefilled([trial.prompt(PROBE)], is_whole=False)
            self.learn(caches, seen)
        except Exception:
            return
        self._is_probed = True

    def learn(self, caches: Sequence[Any], seen: int) -> None:
        """A row's caches, which have seen so many tokens."""
        if self.max_bytes is None:
            return
        found = tuple(row_bytes(caches, tokens, seen) for tokens in LENGTHS)
        known, self._is_probed = () if self._is_probed else self._at, False
        self._at = tuple(map(max, found, known)) if known else found

    def of(self, tokens: int) -> int:
        """Bytes of a row of so many tokens; 0 while that is not known."""
        at = self._at
        if not at or tokens <= 0:
            return 0
        below = max(0, tokens.bit_length() - LENGTHS[0].bit_length())
        if below + 1 >= len(LENGTHS):
            return at[-1] * tokens // LENGTHS[-1]
        least, most = at[below : below + 2]
        share = (tokens - LENGTHS[below]) / (LENGTHS[below + 1] - LENGTHS[below])
        return least + int(max(0.0, share) * (most - least))

    def together(self, lengths: Sequence[int]) -> int:
        """Bytes of rows of so many tokens that live at once, each with its next ``GROWTH`` tokens."""
        slabs = self._slabs([tokens + GROWTH for tokens in lengths])
        return sum(places * self.of(tokens) for places, tokens in slabs)

    def fits(self, row: Row, others: Sequence[Row]) -> bool:
        """Whether a row may live beside others now."""
        return self.max_bytes is None or self.together([tokens(one) for one in (*others, row)]) <= self.max_bytes

    def check(self, row: Row) -> None:
        """Raise DoesNotFit, with the numbers, for a row that does not even fit alone."""
        self.check_length(tokens(row), "")

    def check_length(self, length: int, how: str = "at least ") -> None:
        """Raise DoesNotFit, with the numbers, for a prompt of at least so many tokens that never fits, even alone."""
        if self.max_bytes is not None and (needed := self.together([length])) > self.max_bytes:
            most = f"max_bytes is {self.max_bytes / 1e6:,.1f} MB, which {self._most_tokens():,} tokens fit into"
            raise DoesNotFit(
                f"the request has {how}{length:,} tokens (pictures included), whose keys and values take "
                f"{needed / 1e6:,.1f} MB; {most}"
            )

    def _most_tokens(self) -> int:
        """The longest row that fits alone."""
        assert self.max_bytes is not None
        least, most = 0, LENGTHS[-1]
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.together([middle]) <= self.max_bytes else (least, middle - 1)
        return least


def tokens(row: Row) -> int:
    """Positions that a row has: those of its prompt and of its answer so far, also while it is on its way back to it."""
    return row.facts.length + max(row.answer.num_sampled, len(row.answer.token_ids))


class Sizes:
    """Bytes that something came to, by the power of two of what went in. Of two that were seen, ``keep`` says which stays."""

    def __init__(self, keep: Callable[[int, int], int]) -> None:
        self._keep = keep
        self._seen: dict[int, int] = {}

    def note(self, size: int, nbytes: int) -> None:
        power = size.bit_length()
        self._seen[power] = self._keep(nbytes, self._seen.get(power, nbytes))

    def expected(self, size: int) -> int | None:
        """The bytes that the next larger ones came to, or in proportion to the largest; None if none was seen."""
        power, largest = size.bit_length(), max(self._seen, default=None)
        if largest is None:
            return None
        nearest = min((seen for seen in self._seen if seen >= power), default=largest)
        return self._seen[nearest] << max(0, power - nearest)


class EncoderMemory:
    """Bytes that the encoder takes for a moment, learned from the process's peak around each encoding.

    A row's pictures are encoded beside others only where the device has room for that; alone always. ``limit`` is what
    the device bears, None for no bound.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._sizes = Sizes(min)  # the least that was enough
        self._running: list[tuple[int, int, int]] = []  # (bytes that go in, active before, steps since)

    def begin(self, nbytes: int, before: int | None = None) -> None:
        """The encoding of so many bytes is about to be launched, or was when ``before`` bytes were in use."""
        if nbytes:
            self._running.append((nbytes, mx.get_active_memory() if before is None else before, 0))

    def step(self) -> None:
        """A step has begun: what was launched two steps ago is done by now."""
        if not self._running:
            if self._limit is not None and mx.get_peak_memory() > self._limit:
                begin_peak()  # a load's, or a long prompt's: under it no encoding could be told from one that never fits
            return
        peak, still = mx.get_peak_memory(), []
        for nbytes, before, steps in self._running:
            if steps < STEPS_OF_ENCODING:
                still.append((nbytes, before, steps + 1))
                continue
            self._sizes.note(nbytes, max(0, peak - before))
        self._running = still

    def fits(self, nbytes: int) -> bool:
        """Whether the encoding of so many bytes has room now; unknown sizes do."""
        return self._limit is None or mx.get_active_memory() + self.expected(nbytes) <= self._limit

    def expected(self, nbytes: int) -> int:
        """Bytes that it may take; 0 while that is not known."""
        return (self._sizes.expected(nbytes) or 0) if nbytes else 0
