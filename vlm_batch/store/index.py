"""An index of many rows by their beginnings, so that a prompt is not compared with each of them.

Rows are filed under every whole block of their positions, by a hash of the blocks up to it. The index narrows down only:
the caller compares the positions themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

import numpy as np

#: Positions of a block, and the least that two rows are found to share.
BLOCK = 8
#: Rows of one beginning that are offered, the newest first: any of them shares all of its blocks.
OFFERED = 8

Name = TypeVar("Name", bound=Hashable)


class BeginningIndex(Generic[Name]):
    """Names of rows by their keys (L, 3). A row of less than a block is not found."""

    def __init__(self) -> None:
        self._names: dict[int, list[Name]] = {}

    def add(self, name: Name, keys: np.ndarray) -> None:
        """File a row."""
        for beginning in beginnings(keys):
            self._names.setdefault(beginning, []).append(name)

    def remove(self, name: Name, keys: np.ndarray) -> None:
        """Take a row out again."""
        for beginning in beginnings(keys):
            names = self._names.get(beginning, [])
            if name in names:  # a row whose filing failed is there in part
                names.remove(name)
            if not names:
                self._names.pop(beginning, None)

    def alike(self, keys: np.ndarray) -> Iterator[tuple[Name, int]]:
        """(a row, the least number of positions of ``keys`` that it shares), the longest beginnings first, no row twice.

        A row that comes later shares no more than a block more than it says.
        """
        offered: set[Name] = set()
        filed = list(itertools.takewhile(lambda names: names is not None, map(self._names.get, beginnings(keys))))
        for count, names in reversed(list(enumerate(filed, start=1))):
            for name in itertools.islice(reversed(names or ()), OFFERED):
                if name not in offered:
                    offered.add(name)
                    yield name, count * BLOCK


def beginnings(keys: np.ndarray) -> Iterator[int]:
    """Hashes of the first block, the first two blocks, and so on."""
    size = BLOCK * keys.shape[1] * keys.itemsize
    data, beginning = keys.tobytes(), 0
    for start in range(0, len(keys) // BLOCK * size, size):
        beginning = hash((beginning, data[start : start + size]))
        yield beginning
