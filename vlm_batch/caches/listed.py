"""A layer of a batch that has several caches at once (attention beside a state-space model in one block)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


class ListedCache:
    """What ``CacheList`` is for one row: a model takes each part by its index. Every part is a layer cache of its own."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)

    def __getitem__(self, index: int) -> Any:
        return self.parts[index]

    def put(self, place: int, cache: Any) -> None:
        for part, single in zip(self.parts, cache.caches, strict=True):
            part.put(place, single)

    def clear(self, place: int) -> None:
        for part in self.parts:
            part.clear(place)

    def remove(self, place: int) -> None:
        for part in self.parts:
            part.remove(place)

    def truncate(self, num_places: int) -> None:
        for part in self.parts:
            part.truncate(num_places)

    @property
    def nbytes(self) -> int:
        return sum(int(part.nbytes) for part in self.parts)

    def arrays(self) -> list[mx.array]:
        return [array for part in self.parts for array in part.arrays()]
