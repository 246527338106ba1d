"""Processed pictures by digest."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

from vlm_batch.arrays import num_bytes
from vlm_batch.store.budget import ARRAY_BYTES, ByteBudget


class PictureStore:
    """Processed pictures in the engine's budget, shared by copies of a processor.

    ``get`` and ``put`` are thread-safe; ``update_budget`` runs on the engine's thread. Values are immutable.
    """

    # no ``__dict__``: a processor's parts have settings there
    __slots__ = ("_budget", "_kept", "_used", "num_hits")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._kept: dict[bytes, Any] = {}
        self._used: deque[bytes] = deque()
        self.num_hits = 0

    def __deepcopy__(self, memo: Any) -> PictureStore:
        return self

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes) -> Any | None:
        if (found := self._kept.get(key)) is not None:
            self.num_hits += 1
            self._used.append(key)
        return found

    def put(self, key: bytes, made: Any) -> None:
        if num_bytes(made) + ARRAY_BYTES <= self._budget.max_bytes:
            self._kept[key] = made
            self._used.append(key)

    def update_budget(self) -> None:
        """Count additions and uses since the last call."""
        while self._used:
            key = self._used.popleft()
            made = self._kept.get(key)
            name = (id(self), key)
            is_new = made is not None and not self._budget.touch(name)
            if is_new:
                drop = partial(self._kept.pop, key, None)
                self._budget.add(name, num_bytes(made) + ARRAY_BYTES, drop)
