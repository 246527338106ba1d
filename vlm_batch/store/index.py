"""An index of rows by hashes of prefixes; callers compare positions."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
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
        self._names: dict[int, list[Name]] = {}

    def add(self, name: Name, keys: np.ndarray) -> None:
        for beginning in prefix_hashes(keys):
            self._names.setdefault(beginning, []).append(name)

    def remove(self, name: Name, keys: np.ndarray) -> None:
        for beginning in prefix_hashes(keys):
            names = self._names.get(beginning, [])
            if name in names:  # a failed ``add`` leaves a row in part
                names.remove(name)
            if not names:
                self._names.pop(beginning, None)

    def candidates(self, keys: np.ndarray) -> Iterator[tuple[Name, int]]:
        """Yield (row, least shared positions), longest prefixes first.

        A row may share almost a block more.
        """
        filed: list[list[Name]] = []  # per number of blocks
        for beginning in prefix_hashes(keys):
            names = self._names.get(beginning)
            if names is None:
                break
            filed.append(names)
        offered: set[Name] = set()
        while filed:
            shared = len(filed) * BLOCK
            newest = filed.pop()[: -OFFERED - 1 : -1]
            for name in newest:
                if name in offered:
                    continue
                offered.add(name)
                yield name, shared


def prefix_hashes(keys: np.ndarray) -> Iterator[int]:
    """Yield a hash for each number of first blocks."""
    size = BLOCK * keys.shape[1] * keys.itemsize
    data, beginning = keys.tobytes(), 0
    for start in range(0, len(keys) // BLOCK * size, size):
        beginning = hash((beginning, data[start : start + size]))
        yield beginning
