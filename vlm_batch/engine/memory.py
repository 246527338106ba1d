"""Bytes of the rows' keys and values, and the rows that fit beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlm_batch.caches import Placement
from vlm_batch.caches.layers import row_bytes
from vlm_batch.engine.row import Row
from vlm_batch.errors import OutOfMemory

#: Lengths at which a row's bytes are noted, to be read off between them.
LENGTHS = tuple(1 << power for power in range(4, 21))
#: Steps between two looks at whether rows have grown beyond the bound.
GROWTH = 16


class RowMemory:
    """Bytes of live rows under a bound. What a row takes is learned from rows that were prefilled; before the first one
    nothing is known, and all fit. ``places`` is the number of rows of a slab, each of which is as wide as the longest."""

    def __init__(self, max_bytes: int | None, placement: Placement, places: int) -> None:
        self.max_bytes = max_bytes
        self._places = places if placement is Placement.SLAB else 0
        #: Bytes at each of LENGTHS; of rows with pictures of their own layers, the most seen.
        self._at: tuple[int, ...] = ()

    def learn(self, caches: Sequence[Any], seen: int) -> None:
        """A row's caches, which have seen so many tokens."""
        if self.max_bytes is None:
            return
        found = tuple(row_bytes(caches, tokens, seen) for tokens in LENGTHS)
        self._at = tuple(map(max, found, self._at)) if self._at else found

    def of(self, tokens: int) -> int:
        """Bytes of a row of so many tokens; 0 while that is not known."""
        if not self._at or tokens <= 0:
            return 0
        below = max(0, tokens.bit_length() - LENGTHS[0].bit_length())
        if below + 1 >= len(LENGTHS):
            return self._at[-1] * tokens // LENGTHS[-1]
        least, most = self._at[below : below + 2]
        share = (tokens - LENGTHS[below]) / (LENGTHS[below + 1] - LENGTHS[below])
        return least + int(max(0.0, share) * (most - least))

    def together(self, rows: Sequence[Row]) -> int:
        """Bytes of rows that live at once, each with its next ``GROWTH`` tokens."""
        each = [self.of(tokens(row) + GROWTH) for row in rows]
        return self._places * max(each, default=0) if self._places else sum(each)

    def fits(self, row: Row, others: Sequence[Row]) -> bool:
        """Whether a row may live beside others now."""
        return self.max_bytes is None or self.together([*others, row]) <= self.max_bytes

    def check(self, row: Row) -> None:
        """Raise OutOfMemory, with the numbers, for a row that does not even fit alone."""
        if self.max_bytes is not None and not self.fits(row, ()):
            raise OutOfMemory(
                f"the request has {tokens(row)} tokens (pictures included), whose keys and values take "
                f"{self.together([row]) / 1e6:,.1f} MB; max_bytes is {self.max_bytes / 1e6:,.1f} MB"
            )


def tokens(row: Row) -> int:
    """Positions that a row has: those of its prompt and of its answer so far, also while it is on its way back to it."""
    return row.facts.length + max(row.answer.num_sampled, len(row.answer.token_ids))
