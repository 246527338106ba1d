"""Full attention of one row: mlx-vlm's ``KVCache``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

from vlm_batch.arrays import num_bytes, own_array, round_up
from vlm_batch.caches.layers import (
    LayerCache,
    Placement,
    UpstreamKind,
    kind_of,
    row_of,
    upstream,
)
from vlm_batch.caches.rows import RowsCache
from vlm_batch.caches.slab import SlabCache
from vlm_batch.caches.states import CopiedState, LayerState, filed


@filed
@dataclass(frozen=True)
class FullState(LayerState):
    """Keys (1, H, L, D) and values (1, H, L, D_v)."""

    keys: mx.array
    values: mx.array
    is_whole = True

    def reaches(self, length: int) -> bool:
        return length <= int(self.keys.shape[2])

    def restore(self, length: int) -> KVCache:
        cache = KVCache()
        cache.keys = self.keys[:, :, :length]
        cache.values = self.values[:, :, :length]
        cache.offset = length
        return cache


@upstream(KVCache)
class FullKind(UpstreamKind):
    cache: KVCache
    is_whole = True
    holds_rows = True
    can_trim = True

    def row(self, index: int, *, is_own: bool = True) -> KVCache:
        taken = KVCache()
        if self.cache.keys is None:
            return taken
        cut = row_of(index, is_own=is_own)
        taken.keys, taken.values = cut(self.cache.keys), cut(self.cache.values)
        taken.offset = self.cache.offset
        return taken

    def trim(self, count: int) -> None:
        self.cache.offset -= count

    def saved(self, length: int) -> LayerState:
        cache = self.cache
        if cache.keys is None:  # GLM-5-Next has layers with empty caches
            return CopiedState.of(cache, length)
        return FullState(
            *(
                own_array(part[:, :, : cache.offset])
                for part in (cache.keys, cache.values)
            )
        )

    def batched(self, placement: Placement, num_places: int) -> LayerCache:
        if placement is Placement.SLAB:
            return SlabCache(num_places)
        return RowsCache()

    def bytes_at(self, tokens: int, seen: int) -> int:
        """Count by the tokens that it holds: a decoder behind an encoder of text holds fewer than a prompt has."""
        held = max(1, self.cache.offset)
        return num_bytes(self.cache.state) * round_up(tokens, KVCache.step) // held

    def full_parts(self) -> tuple[KVCache, ...]:
        return (self.cache,)

    def with_full(self, change: Callable[[KVCache], Any]) -> Any:
        return change(self.cache)


def can_share(caches: Sequence[Any]) -> bool:
    """Whether new caches can hold several rows of one length."""
    return all(kind_of(cache).holds_rows for cache in caches)


def can_trim(caches: Sequence[Any]) -> bool:
    """Whether padding can be removed from a row's caches."""
    return all(kind_of(cache).can_trim for cache in caches)


def can_fill(caches: Sequence[Any]) -> bool:
    """Whether shorter rows of an array can be filled up."""
    return all(kind_of(cache).can_fill for cache in caches)


def trim(caches: Sequence[Any], count: int) -> None:
    """Remove the last ``count`` positions from a row's caches."""
    if not count:
        return
    for cache in caches:
        kind_of(cache).trim(count)


def take_row(caches: Sequence[Any], row: int, *, is_own: bool = True) -> list[Any]:
    """Return one row's caches from caches of several; ``is_own`` copies arrays."""
    return [kind_of(cache).row(row, is_own=is_own) for cache in caches]
