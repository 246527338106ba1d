"""The automatic prefix cache: it finds the saved row that shares the longest beginning with a prompt.

Pure bookkeeping: rows are found by their keys (token ids and picture digests, compared position by position, so that
nothing is ever taken for something else), kept within a budget of bytes, and never changed. Beginnings of less than a
block (``index.BLOCK``) are not looked for.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from vlm_batch.records import PromptKey
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.index import BLOCK, BeginningIndex
from vlm_batch.store.saved import SavedRow, Snapshot, common_length

_log = logging.getLogger(__name__)

#: Snapshots that one saved row keeps: the first (what many prompts share) and the last ones. Recurrent states are large.
MAX_SNAPSHOTS = 8


@dataclass(frozen=True)
class Match:
    """A saved row and the ``length`` from which a prompt can continue it. They may share more, up to ``common``."""

    row: SavedRow
    length: int
    common: int


def match(row: SavedRow, key: PromptKey) -> Match:
    """The place at which a prompt can continue a saved row; ``length`` is 0 if there is none.

    The last position is left to be computed, for its logits, unless they were saved. A row never continues inside a span.
    """
    common = common_length(row.keys, key.positions)
    limit = common
    if common == key.length:
        if row.logits_at(common) is not None and row.resumable(common) == common:
            return Match(row, common, common)
        limit = common - 1
    while (length := row.resumable(limit)) and (start := key.before_span(length)) < length:
        limit = start
    return Match(row, length, common)


class SecondTier(Protocol):
    """A store for rows that the budget pushes out, in which they may be found again."""

    def put(self, row: SavedRow) -> None: ...
    def find(self, keys: np.ndarray, beyond: int) -> SavedRow | None: ...


class PrefixCache:
    """Saved rows by their beginnings. A row that the budget pushes out goes to the second tier, if there is one."""

    def __init__(self, budget: ByteBudget, second: SecondTier | None = None) -> None:
        self.budget = budget
        self.second = second
        self.version = 0  # changes whenever what can be found changes
        self._rows: dict[int, SavedRow] = {}
        self._index: BeginningIndex[int] = BeginningIndex()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> tuple[SavedRow, ...]:
        """Everything that is kept, oldest first."""
        return tuple(self._rows.values())

    def find(self, key: PromptKey, least: int = 0) -> Match | None:
        """The row from which a prompt can go on furthest; ``common`` is the most that any row shares with it. None if that is
        less than ``least``, or nothing.

        A row of the second tier that shares more comes back into memory first.
        """
        keys = key.positions
        if self.second is not None:
            known = max(
                (common_length(self._rows[number].keys, keys) for number, _ in self._index.alike(keys)), default=0
            )
            if known < key.length and (row := self._second_find(keys, known)) is not None:
                self.store(row)
        matches, longest = dict[int, Match](), 0
        for number, shared in self._index.alike(keys):
            if matches and longest >= shared + BLOCK:
                break  # those that come later share less
            matches[number] = match(self._rows[number], key)
            longest = max(longest, matches[number].length)
        common = max((found.common for found in matches.values()), default=0)
        if not matches or common < least:
            return None
        best = max(matches, key=lambda number: matches[number].length)
        if longest:
            self.budget.touch((id(self), best))
        return replace(matches[best], common=common)

    def store(self, row: SavedRow) -> None:
        """Keep a row. Rows that it continues go into it; if it is the beginning of a kept row, it goes into that one.

        If that fails, the row is not kept, and no request fails.
        """
        number = next(self._numbers)
        try:
            for other, _ in list(self._index.alike(row.keys)):
                kept = self._rows[other]
                if common_length(kept.keys, row.keys) < min(kept.length, row.length):
                    continue
                longer, shorter = (kept, row) if kept.length > row.length else (row, kept)
                row = replace(longer, snapshots=thin({**shorter.snapshots, **longer.snapshots}))
                self._forget(other)
            if self.budget.add((id(self), number), row.footprint, lambda: self._evict(number)):
                self._rows[number] = row
                self._index.add(number, row.keys)
                self.version += 1
            else:
                self._pass_on(row)
        except Exception as error:
            self._forget(number)
            _log.warning("a row could not be kept for later requests: %r", error)

    def close(self) -> None:
        """Hand all rows to the second tier."""
        for row in self.rows if self.second is not None else ():
            self._pass_on(row)
        self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        for number in list(self._rows):
            self._forget(number)

    def _evict(self, number: int) -> None:
        """Drop a row that the budget pushes out; the second tier gets it."""
        row = self._rows[number]
        self._forget(number)
        self._pass_on(row)

    def _forget(self, number: int) -> None:
        """Remove a row from every table."""
        self.budget.remove((id(self), number))
        if (row := self._rows.pop(number, None)) is not None:
            self._index.remove(number, row.keys)
            self.version += 1

    def _pass_on(self, row: SavedRow) -> None:
        try:
            if self.second is not None:
                self.second.put(row)
        except Exception as error:
            _log.warning("a row could not be written for later requests: %r", error)

    def _second_find(self, keys: np.ndarray, beyond: int) -> SavedRow | None:
        try:
            return None if self.second is None else self.second.find(keys, beyond)
        except Exception as error:
            _log.warning("no row could be read for a request: %r", error)
            return None


def thin(snapshots: dict[int, Snapshot]) -> dict[int, Snapshot]:
    """The first and the last of too many snapshots."""
    order = sorted(snapshots)
    kept = order if len(order) <= MAX_SNAPSHOTS else [order[0], *order[1 - MAX_SNAPSHOTS :]]
    return {at: snapshots[at] for at in kept}
