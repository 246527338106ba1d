"""Sliding windows of one row: mlx-vlm's ``RotatingKVCache``."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from mlx_vlm.models.cache import RotatingKVCache

from vlm_batch.arrays import own_array
from vlm_batch.caches.layers import (
    LayerCache,
    Placement,
    UpstreamKind,
    row_of,
    upstream,
)
from vlm_batch.caches.rows import RowsCache
from vlm_batch.caches.slab import RingSlabCache
from vlm_batch.caches.states import LayerState, filed


@filed
@dataclass(frozen=True)
class WindowState(LayerState):
    """The last tokens in order, of ``length`` seen; a full window cannot be cut."""

    keys: mx.array  # (1, H, min(length, window), D)
    values: mx.array
    length: int
    window: int
    keep: int

    def reaches(self, length: int) -> bool:
        return length == self.length or (
            length <= self.length <= int(self.keys.shape[2])
        )

    def restore(self, length: int) -> RotatingKVCache:
        cache = RotatingKVCache(self.window, self.keep)
        kept = int(self.keys.shape[2]) - (self.length - length)
        cache.keys, cache.values = self.keys[:, :, :kept], self.values[:, :, :kept]
        cache.offset, cache._idx = length, kept
        return cache


@upstream(RotatingKVCache)
class WindowKind(UpstreamKind):
    """A ``RotatingKVCache``; its first ``keep`` tokens stay."""

    cache: RotatingKVCache
    holds_rows = True

    def row(self, index: int, *, is_own: bool = True) -> RotatingKVCache:
        cache, cut = self.cache, row_of(index, is_own=is_own)
        taken = RotatingKVCache(cache.max_size, cache.keep)
        taken.keys, taken.values, taken.offset, taken._idx = (
            cut(cache.keys),
            cut(cache.values),
            cache.offset,
            cache._idx,
        )
        return taken

    @property
    def span(self) -> int:
        return int(self.cache.max_size)

    def most_positions(self, *, is_fixed: bool) -> int:
        if is_fixed:  # reordering a full ring changes bits
            return int(self.cache.max_size - self.cache.offset)
        return super().most_positions(is_fixed=False)

    @property
    def can_trim(self) -> bool:
        return self.cache.keep == 0

    def trim(self, count: int) -> None:
        """Cut the last positions; a chunk keeps all that its first position sees."""
        cache = self.cache
        cache.keys, cache.values = (
            part[:, :, :-count] for part in (cache.keys, cache.values)
        )
        cache.offset, cache._idx = cache.offset - count, cache._idx - count

    def saved(self, length: int) -> WindowState:
        cache = self.cache
        keys = cache._temporal_order(cache.keys)
        values = cache._temporal_order(cache.values)
        if cache.keep == 0:  # a chunk keeps more than the next token sees
            first = -min(cache.offset, cache.max_size)
            keys, values = keys[:, :, first:], values[:, :, first:]
        return WindowState(
            own_array(keys),
            own_array(values),
            cache.offset,
            cache.max_size,
            cache.keep,
        )

    def bytes_at(self, tokens: int, seen: int) -> int:
        cache = self.cache
        if cache.keys is None:
            return 0
        each = sum(part.nbytes // part.shape[2] for part in (cache.keys, cache.values))
        return each * min(tokens, cache.max_size)

    def batched(self, placement: Placement, num_places: int) -> LayerCache:
        if placement is Placement.SLAB and self.cache.keep == 0:
            return RingSlabCache(num_places, self.cache.max_size)
        return RowsCache()
