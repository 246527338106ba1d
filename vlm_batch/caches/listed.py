"""A layer of a batch that has several caches at once (attention beside a state-space model in one block)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import CacheList


class ListedCache(CacheList):
    """mlx-vlm's ``CacheList`` whose parts are layer caches of a batch; a model takes each part by its index."""

    caches: tuple[Any, ...]

    def put(self, place: int, cache: CacheList) -> None:
        """Give each part the row's own."""
        for part, single in zip(self.caches, cache.caches, strict=True):
            part.put(place, single)

    def take(self, place: int) -> CacheList:
        """The row's own caches, one a part."""
        return CacheList(*(part.take(place) for part in self.caches))

    def clear(self, place: int) -> None:
        """Free a place in every part."""
        for part in self.caches:
            part.clear(place)

    def remove(self, place: int) -> None:
        """Forget the row at a place in every part and close the gaps."""
        for part in self.caches:
            part.remove(place)

    def resize(self, num_places: int) -> None:
        """Have so many places in every part."""
        for part in self.caches:
            part.resize(num_places)

    def arrays(self) -> list[mx.array]:
        """Every array that is held, to be evaluated."""
        return [array for part in self.caches for array in part.arrays()]
