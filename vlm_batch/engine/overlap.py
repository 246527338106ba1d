"""The beginning that a waiting row shares with prompts that are computed, or were."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from vlm_batch.engine.row import Row
from vlm_batch.records import PromptKey
from vlm_batch.store.prefix import NoPrefixCache
from vlm_batch.store.saved import common_length


class Overlap:
    """Positions after which one row could continue others: measured once, since it is asked at each step."""

    def __init__(self) -> None:
        # while it waits, many others may come and go
        self._with_rows: WeakKeyDictionary[Row, int] = WeakKeyDictionary()
        self._version = -1  # of the prefix cache at the last look
        self._in_cache = 0

    def shared_with(self, other: Row, key: PromptKey) -> int:
        """Return the positions that a row with ``key`` shares with a row in prefill."""
        if other not in self._with_rows:
            theirs = other.reuse.key
            if theirs is None:
                return 0
            common = common_length(key.positions, theirs.positions)
            self._with_rows[other] = key.before_span(min(common, key.length - 1))
        return self._with_rows[other]

    def cached(self, prefix: NoPrefixCache, key: PromptKey) -> int:
        """Return the positions that the prefix cache has."""
        if self._version != prefix.version:
            found = prefix.find(key)
            self._in_cache = 0 if found is None else found.length
            self._version = prefix.version
        return self._in_cache
