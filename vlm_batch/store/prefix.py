"""The prefix cache: finds the saved row with a prompt's longest prefix.

It compares token ids and picture digests, and finds no prefix shorter than ``index.BLOCK``.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, replace
from functools import partial

from vlm_batch.records import PromptKey
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.directory import RowFiles
from vlm_batch.store.index import BLOCK, PrefixIndex, prefix_hashes
from vlm_batch.store.saved import SavedRow, Snapshot, common_length

_log = logging.getLogger(__name__)

#: Snapshots per saved row: the first, which many prompts share, and the last ones. Recurrent states are large.
MAX_SNAPSHOTS = 8


@dataclass(frozen=True)
class Match:
    """A saved row with ``common`` positions of a prompt, which continues it at ``length``."""

    row: SavedRow
    length: int
    common: int


def match(row: SavedRow, key: PromptKey) -> Match:
    """Find where a prompt can continue a saved row outside spans; ``length`` 0: nowhere.

    The last position is recomputed unless its logits were saved.
    """
    common = common_length(row.keys, key.positions)
    limit = common
    if common == key.length:
        has_logits = row.logits_at(common) is not None
        if has_logits and row.resumable(common) == common:
            return Match(row, common, common)
        limit = common - 1
    while length := row.resumable(limit):
        limit = key.before_span(length)
        if limit >= length:
            break
    return Match(row, length, common)


class NoPrefixCache:
    """Of an engine that keeps no row for later ones."""

    keeps = False  # whether rows are kept
    version = 0  # grows with every change of the rows
    rows: tuple[SavedRow, ...] = ()

    def __init__(self) -> None:
        self.budget = ByteBudget(0)

    def find(self, key: PromptKey, least: int = 0) -> Match | None:
        """Return the longest match, if a row of either tier shares ``least`` positions."""
        return None

    def store(self, row: SavedRow) -> None:
        """Keep a row, merged with its prefixes or continuation; ignore failures."""

    def close(self) -> None:
        """Move all rows to the second tier."""


class PrefixCache(NoPrefixCache):
    """Saved rows by prefix; evicted rows go to the second tier, if any."""

    keeps = True

    def __init__(self, budget: ByteBudget, second: RowFiles | None = None) -> None:
        self.budget = budget
        self.second = second
        self._rows: dict[int, SavedRow] = {}
        self._index: PrefixIndex[int] = PrefixIndex()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> tuple[SavedRow, ...]:  # type: ignore[override]
        return tuple(self._rows.values())

    def find(self, key: PromptKey, least: int = 0) -> Match | None:
        self._read_longer(key)
        matches = self._matches(key)
        common = max((found.common for found in matches.values()), default=-1)
        if common < least:
            return None
        best = max(matches, key=lambda number: matches[number].length)
        if matches[best].length:
            self.budget.touch((id(self), best))
        return replace(matches[best], common=common)

    def _matches(self, key: PromptKey) -> dict[int, Match]:
        """Return matches of rows, by number, until no later row can be longer."""
        matches, longest = dict[int, Match](), 0
        for number, shared in self._index.candidates(key.positions):
            if longest >= shared + BLOCK:
                break  # later rows share less
            matches[number] = match(self._rows[number], key)
            longest = max(longest, matches[number].length)
        return matches

    def _read_longer(self, key: PromptKey) -> None:
        """Take a row from the second tier, if any, that shares more than any here."""
        if self.second is None:
            return
        keys = key.positions
        longest = 0
        for number, _ in self._index.candidates(keys):
            common = common_length(self._rows[number].keys, keys)
            longest = max(longest, common)
        if longest == key.length:
            return
        try:
            row = self.second.find(keys, longest)
        except Exception as error:
            _log.warning("no row could be read for a request: %r", error)
            return
        if row is not None:
            self.store(row)

    def store(self, row: SavedRow) -> None:
        number = next(self._numbers)
        try:
            for other, _ in list(self._index.candidates(row.keys)):
                merged = _merged(self._rows[other], row)
                if merged is not None:
                    row = merged
                    self._forget(other)
            self._add(number, row)
        except Exception as error:
            self._forget(number)
            _log.warning("a row could not be kept for later requests: %r", error)

    def _add(self, number: int, row: SavedRow) -> None:
        """Keep a row, or pass it on if the whole budget is too small for it."""
        name = (id(self), number)
        names = [(id(self), beginning) for beginning in prefix_hashes(row.keys)]
        drop = partial(self._evict, number)
        if not self.budget.add(name, row.footprint, drop, names):
            self._pass_on(row)
            return
        self._rows[number] = row
        self._index.add(number, row.keys)
        self.version += 1

    def close(self) -> None:
        for row in self.rows:
            self._pass_on(row)
        self.clear()

    def clear(self) -> None:
        for number in list(self._rows):
            self._forget(number)

    def _evict(self, number: int) -> None:
        row = self._rows[number]
        self._forget(number)
        self._pass_on(row)

    def _forget(self, number: int) -> None:
        self.budget.remove((id(self), number))
        row = self._rows.pop(number, None)
        if row is None:
            return
        self._index.remove(number, row.keys)
        self.version += 1

    def _pass_on(self, row: SavedRow) -> None:
        if self.second is None:
            return
        try:
            self.second.put(row)
        except Exception as error:
            _log.warning("a row could not be written for later requests: %r", error)


def _merged(kept: SavedRow, new: SavedRow) -> SavedRow | None:
    """Return one row for two of which one continues the other, or None."""
    longer, shorter = (kept, new) if kept.length > new.length else (new, kept)
    if common_length(longer.keys, shorter.keys) < shorter.length:
        return None
    return replace(longer, snapshots=thin({**shorter.snapshots, **longer.snapshots}))


def thin(snapshots: dict[int, Snapshot]) -> dict[int, Snapshot]:
    order = sorted(snapshots)
    if len(order) > MAX_SNAPSHOTS:
        order = [order[0], *order[1 - MAX_SNAPSHOTS :]]
    return {at: snapshots[at] for at in order}
