"""Bytes of live rows, and of the encoder's work."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.caches.layers import row_bytes
from vlm_batch.engine.row import Row
from vlm_batch.engine.trial import Trial
from vlm_batch.errors import DoesNotFit
from vlm_batch.runtime.memory import reset_peak

#: Lengths at which a row's bytes are stored; others are interpolated.
LENGTHS = tuple(1 << power for power in range(4, 21))
UNKNOWN = (0,) * len(LENGTHS)
#: Steps between two checks of grown rows against the bound.
GROWTH = 16
#: Steps after which a launched encoding is done.
STEPS_OF_ENCODING = 2
#: Tokens of the made-up prompt: a whole step of growth of a single-row cache.
PROBE = 256


class RowMemory:
    """Bytes of live rows under a bound, before they enter. Engine's thread only.

    Args:
        max_bytes: None: no bound, for which nothing is learned.
        slabs: returns the (places, columns) of rows of these lengths.
        more: bytes per token outside the batch's layers.
    """

    def __init__(
        self,
        max_bytes: int | None,
        slabs: Callable[[Sequence[int]], Sequence[tuple[int, int]]],
        more: int = 0,
    ) -> None:
        self.max_bytes = max_bytes
        self._most_bytes = math.inf if max_bytes is None else max_bytes
        self._slabs = slabs
        self._more = more
        #: Bytes at each of LENGTHS; rows with layers of their own for pictures count as the largest seen.
        self._at = UNKNOWN
        self._num_steps = 0
        self._is_probed = False  # known from a prompt without pictures, not from a row

    def probe(self, trial: Trial) -> None:
        """Learn a row's bytes from a made-up prompt, or the first row if the family needs a picture."""
        if self.max_bytes is None:
            return
        try:
            _, caches, seen = trial.prefilled([trial.prompt(PROBE)], is_whole=False)
            self.learn(caches, seen)
        except Exception:
            return
        self._is_probed = True

    def learn(self, caches: Sequence[Any], seen: int) -> None:
        """Learn a row's bytes from its caches of ``seen`` tokens."""
        if self.max_bytes is None:
            return
        known = UNKNOWN if self._is_probed else self._at
        self._is_probed = False

        def bytes_at(length: int) -> int:
            return row_bytes(caches, length, seen) + self._more * length

        index = min(bisect_left(LENGTHS, seen), len(LENGTHS) - 1)
        if bytes_at(LENGTHS[index]) <= known[index]:
            # rows differ by their pictures alone, which take the same at every length
            return
        self._at = tuple(map(max, map(bytes_at, LENGTHS), known))

    def of(self, tokens: int) -> int:
        """Return a row's bytes; 0 if unknown."""
        at = self._at
        below = max(0, tokens.bit_length() - LENGTHS[0].bit_length())
        if below + 1 >= len(LENGTHS):
            return at[-1] * tokens // LENGTHS[-1]
        least, most = at[below : below + 2]
        share = (tokens - LENGTHS[below]) / (LENGTHS[below + 1] - LENGTHS[below])
        return least + int(max(0.0, share) * (most - least))

    def together(self, lengths: Sequence[int]) -> int:
        """Return the bytes of such rows ``GROWTH`` tokens later."""
        slabs = self._slabs([tokens + GROWTH for tokens in lengths])
        return sum(places * self.of(tokens) for places, tokens in slabs)

    def fits(self, lengths: Sequence[int]) -> bool:
        """Return whether rows with so many tokens fit together."""
        return self.together(lengths) <= self._most_bytes

    def is_look_due(self) -> bool:
        """Count a step; return whether rows may have outgrown what they were checked for, as none has before."""
        self._num_steps += 1
        return self._num_steps % GROWTH == 0

    def check(self, row: Row) -> None:
        """Raise DoesNotFit for a row that never fits."""
        self.check_length(tokens(row), "")

    def check_length(self, length: int, how: str = "at least ") -> None:
        """Raise DoesNotFit for a prompt that never fits. Safe from any thread."""
        needed = self.together([length])
        if needed <= self._most_bytes:
            return
        most = f"max_bytes is {self._most_bytes / 1e6:,.1f} MB, which {self._most_tokens():,} tokens fit into"
        raise DoesNotFit(
            f"the request has {how}{length:,} tokens (pictures included), whose keys and values take "
            f"{needed / 1e6:,.1f} MB; {most}"
        )

    def _most_tokens(self) -> int:
        least, most = 0, LENGTHS[-1]
        while least < most:
            middle = (least + most + 1) // 2
            if self.fits([middle]):
                least = middle
            else:
                most = middle - 1
        return least


def tokens(row: Row) -> int:
    """Return a row's positions: prompt, and answer so far, or all that it will say where it scores options.

    Those take many positions at a time, and could outgrow the bound before the next look at grown rows.
    """
    answer = row.answer
    if answer.path is not None:
        return row.facts.length + answer.max_tokens
    return row.facts.length + max(answer.num_sampled, len(answer.token_ids))


class Sizes:
    """Bytes of outputs by the input's power of two. ``keep`` chooses between two observations."""

    def __init__(self, keep: Callable[[int, int], int]) -> None:
        self._keep = keep
        self._seen: dict[int, int] = {}

    def note(self, size: int, nbytes: int) -> None:
        power = size.bit_length()
        self._seen[power] = self._keep(nbytes, self._seen.get(power, nbytes))

    def expected(self, size: int) -> int | None:
        """Return the bytes of the next larger input, else in proportion to the largest."""
        if not self._seen:
            return None
        power, powers = size.bit_length(), sorted(self._seen)
        at = min(bisect_left(powers, power), len(powers) - 1)
        nearest = powers[at]
        return self._seen[nearest] << max(0, power - nearest)


class EncoderMemory:
    """The encoder's temporary bytes, learned from memory peaks, under ``limit``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sizes = Sizes(min)  # a peak may have other causes
        # (input bytes, active bytes before, steps since)
        self._running: list[tuple[int, int, int]] = []

    def begin(self, nbytes: int, before: int | None = None) -> None:
        """Record the launch of an encoding. ``before``: bytes in use then; None: now."""
        if not nbytes:
            return
        if before is None:
            before = mx.get_active_memory()
        self._running.append((nbytes, before, 0))

    def step(self) -> None:
        """Learn from finished encodings."""
        peak = mx.get_peak_memory()
        if not self._running:
            self._forget(peak)
            return
        still: list[tuple[int, int, int]] = []
        for nbytes, before, steps in self._running:
            if steps < STEPS_OF_ENCODING:
                still.append((nbytes, before, steps + 1))
                continue
            self._sizes.note(nbytes, max(0, peak - before))
        self._running = still

    def _forget(self, peak: int) -> None:
        """Forget the peak that a load or a long prompt has left, which would hide those of encodings."""
        if peak > self._limit:
            reset_peak()

    def fits(self, nbytes: int) -> bool:
        """Return whether an encoding has room; an unknown size has."""
        return mx.get_active_memory() + self.expected(nbytes) <= self._limit

    def expected(self, nbytes: int) -> int:
        """Return expected bytes; 0 if unknown."""
        if not nbytes:
            return 0
        return self._sizes.expected(nbytes) or 0
