"""A layer of a batch that has several caches at once (attention beside a state-space model in one block)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import CacheList, KVCache

from vlm_batch.caches.layers import (
    LayerCache,
    Placement,
    UpstreamKind,
    kind_of,
    row_bytes,
    upstream,
)
from vlm_batch.caches.slab import SlabCache
from vlm_batch.caches.states import LayerState, filed


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


def parts_of(layer: Any) -> Iterator[Any]:
    """The caches that a batch's layer is made of: itself, or those that it lists."""
    if isinstance(layer, ListedCache):
        for part in layer.caches:
            yield from parts_of(part)
    else:
        yield layer


def set_layer(layer: LayerCache, columns: Callable[[int], int], few_bits: str, *, always_masked: bool = False) -> None:
    """Set how a batch's layer is read; kinds do not look at what is not for them.

    ``columns``: those of a slab whose longest row has so many tokens. ``few_bits``, of the policy: how attention is handed what
    is held in few bits. ``always_masked``: columns are masked at every step, even if every row sees all, and each row attends
    over its own by itself, so that no row depends on another.
    """
    for part in parts_of(layer):
        part.columns, part.few_bits, part.always_masked = columns, few_bits, always_masked


def level(layers: Sequence[LayerCache]) -> None:
    """Cut slabs of one kind to the columns that all of them have: a row that could not be put into each has widened some, and
    layers share their mask."""
    kinds: dict[tuple[type, int | None], list[SlabCache]] = {}
    for layer in layers:
        for part in parts_of(layer):
            if isinstance(part, SlabCache) and part.arrays():
                kinds.setdefault((type(part), part.span), []).append(part)
    for parts in kinds.values():
        least = min(part.capacity for part in parts)
        for part in parts:
            part.cut(least)


@filed
@dataclass(frozen=True)
class ListState(LayerState):
    """A layer with several caches at once."""

    states: tuple[LayerState, ...]

    @property
    def is_whole(self) -> bool:  # type: ignore[override]
        return all(state.is_whole for state in self.states)

    @property
    def floor(self) -> int:  # type: ignore[override]
        return max((state.floor for state in self.states), default=0)

    def reaches(self, length: int) -> bool:
        return all(state.reaches(length) for state in self.states)

    def restore(self, length: int) -> CacheList:
        return CacheList(*(state.restore(length) for state in self.states))


@upstream(CacheList)
class ListKind(UpstreamKind):
    """A ``CacheList``."""

    cache: CacheList

    @property
    def is_whole(self) -> bool:  # type: ignore[override]
        return all(kind_of(part).is_whole for part in self.cache.caches)

    def saved(self, length: int) -> ListState:
        return ListState(tuple(kind_of(part).saved(length) for part in self.cache.caches))

    def bytes_at(self, tokens: int, seen: int) -> int:
        return row_bytes(self.cache.caches, tokens, seen)

    def batched(self, placement: Placement, num_places: int) -> LayerCache:
        return ListedCache(*(kind_of(part).batched(placement, num_places) for part in self.cache.caches))

    def full_parts(self) -> tuple[KVCache, ...]:
        return tuple(full for part in self.cache.caches for full in kind_of(part).full_parts())

    def with_full(self, change: Callable[[KVCache], Any]) -> CacheList:
        return CacheList(*(kind_of(part).with_full(change) for part in self.cache.caches))
