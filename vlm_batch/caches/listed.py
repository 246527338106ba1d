"""Layers with several caches, such as attention beside a state-space model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import CacheList, KVCache

from vlm_batch.caches.layers import (
    CacheKind,
    LayerCache,
    Placement,
    UpstreamKind,
    kind_of,
    row_bytes,
    upstream,
)
from vlm_batch.caches.states import LayerState, filed


class ListedCache(LayerCache, CacheList):
    """mlx-vlm's ``CacheList`` of batch caches."""

    caches: tuple[Any, ...]

    def configure(
        self,
        columns: Callable[[int], int],
        few_bits: str,
        *,
        always_masked: bool = False,
    ) -> None:
        for part in self.caches:
            part.configure(columns, few_bits, always_masked=always_masked)

    def put(self, place: int, cache: CacheList) -> None:
        for part, single in zip(self.caches, cache.caches, strict=True):
            part.put(place, single)

    def extract(self, place: int) -> CacheList:
        return CacheList(*(part.extract(place) for part in self.caches))

    def clear(self, place: int) -> None:
        for part in self.caches:
            part.clear(place)

    def keep_places(self, places: list[int]) -> None:
        for part in self.caches:
            part.keep_places(places)

    def resize(self, num_places: int) -> None:
        for part in self.caches:
            part.resize(num_places)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.caches)

    @property
    def can_trace(self) -> bool:
        return all(part.can_trace for part in self.caches)

    @property
    def has_graphs_kernels(self) -> bool:
        return all(part.has_graphs_kernels for part in self.caches)

    @property
    def most_positions(self) -> int:
        return min(part.most_positions for part in self.caches)

    @property
    def state_bytes(self) -> int:
        return sum(part.state_bytes for part in self.caches)

    def drafted(self, counts: Sequence[int]) -> ListedCache:
        return ListedCache(*(part.drafted(counts) for part in self.caches))

    def keep(self, place: int, kept: int, of: int) -> None:
        for part in self.caches:
            part.keep(place, kept, of)

    def arrays(self) -> list[mx.array]:
        return [array for part in self.caches for array in part.arrays()]


def parts_of(layer: Any) -> Iterator[Any]:
    """Yield a layer's caches, whatever lists they are in."""
    if not isinstance(layer, CacheList):
        yield layer
        return
    for part in layer.caches:
        yield from parts_of(part)


def equalise_capacity(layers: Sequence[LayerCache]) -> None:
    """Cut slabs to one capacity: a failed ``put`` may have grown some, but layers share masks."""
    slabs = [part for layer in layers for part in parts_of(layer) if part.capacity]
    least: dict[tuple[type, int | None], int] = {}
    for slab in slabs:
        kind = (type(slab), slab.span)
        least[kind] = min(slab.capacity, least.get(kind, slab.capacity))
    for slab in slabs:
        slab.cut(least[type(slab), slab.span])


@filed
@dataclass(frozen=True)
class ListState(LayerState):
    states: tuple[LayerState, ...]

    @property
    def is_whole(self) -> bool:
        return all(state.is_whole for state in self.states)

    @property
    def floor(self) -> int:
        return max((state.floor for state in self.states), default=0)

    def reaches(self, length: int) -> bool:
        return all(state.reaches(length) for state in self.states)

    def restore(self, length: int) -> CacheList:
        return CacheList(*(state.restore(length) for state in self.states))


@upstream(CacheList)
class ListKind(UpstreamKind):
    cache: CacheList

    @property
    def kinds(self) -> list[CacheKind]:
        return [kind_of(part) for part in self.cache.caches]

    @property
    def is_whole(self) -> bool:
        return all(kind.is_whole for kind in self.kinds)

    @property
    def holds_rows(self) -> bool:
        return all(kind.holds_rows for kind in self.kinds)

    @property
    def can_fill(self) -> bool:
        return all(kind.can_fill for kind in self.kinds)

    def trim(self, count: int) -> None:
        for kind in self.kinds:
            kind.trim(count)

    def row(self, index: int, *, is_own: bool = True) -> CacheList:
        rows = [kind.row(index, is_own=is_own) for kind in self.kinds]
        return CacheList(*rows)

    def saved(self, length: int) -> ListState:
        states = [kind.saved(length) for kind in self.kinds]
        return ListState(tuple(states))

    def bytes_at(self, tokens: int, seen: int) -> int:
        return row_bytes(self.cache.caches, tokens, seen)

    def batched(self, placement: Placement, num_places: int) -> LayerCache:
        layers = [kind.batched(placement, num_places) for kind in self.kinds]
        return ListedCache(*layers)

    def full_parts(self) -> tuple[KVCache, ...]:
        return tuple(chain.from_iterable(kind.full_parts() for kind in self.kinds))

    def with_full(self, change: Callable[[KVCache], Any]) -> CacheList:
        changed = [kind.with_full(change) for kind in self.kinds]
        return CacheList(*changed)
