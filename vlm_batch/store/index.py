"""An index of rows by hashes of prefixes; callers compare positions."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import islice, takewhile
from typing import Generic, TypeVar

import numpy as np

#: Positions per block, and the shortest prefix that is found.
BLOCK = 8
#: Rows offered per prefix, the newest first.
OFFERED = 8

Name = TypeVar("Name", bound=Hashable)


class PrefixIndex(Generic[Name]):
    """Names of rows by their keys (L, 3) of at least a block."""

    def __init__(self) -> None:
        # in the order in which they came
        self._names: dict[int, dict[Name, None]] = {}

    def add(self, name: Name, keys: np.ndarray) -> None:
        for beginning in prefix_hashes(keys):
            self._names.setdefault(beginning, {})[name] = None

    def remove(self, name: Name, keys: np.ndarray) -> None:
        for beginning in prefix_hashes(keys):
            names = self._names.get(beginning, {})
            names.pop(name, None)  # a failed ``add`` leaves a row in part
            if not names:
                self._names.pop(beginning, None)

    def candidates(self, keys: np.ndarray) -> Iterator[tuple[Name, int]]:
        """Yield (row, least shared positions), longest prefixes first.

        A row may share almost a block more.
        """
        # per number of blocks
        filed = list(takewhile(bool, map(self._names.get, prefix_hashes(keys))))
        offered: set[Name] = set()
        while filed:
            shared = len(filed) * BLOCK
            for name in islice(reversed(filed.pop() or {}), OFFERED):
                if name not in offered:
                    offered.add(name)
                    yield name, shared


def prefix_hashes(keys: np.ndarray) -> Iterator[int]:
    """Yield a hash for each number of first blocks."""
    size = BLOCK * keys.shape[1] * keys.itemsize
    data, beginning = keys.tobytes(), 0
    for start in range(0, len(keys) // BLOCK * size, size):
        beginning = hash((beginning, data[start : start + size]))
        yield beginning
