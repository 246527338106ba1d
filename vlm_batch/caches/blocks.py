"""Layers whose tokens attend within blocks of positions (Llama 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import ChunkedKVCache

from vlm_batch.arrays import num_bytes, own_array
from vlm_batch.caches.layers import CacheKind, LayerCache, Placement, row_of
from vlm_batch.caches.rows import RowsCache
from vlm_batch.caches.slab import RingSlabCache, SlabCache
from vlm_batch.caches.states import LayerState, filed


class BlockCache(CacheKind, ChunkedKVCache):
    """One row's keys and values of the current block.

    mlx-vlm keeps a sliding window of the block's size and masks the rest.
    """

    keys: mx.array | None  # (1, H, >= L, D)
    values: mx.array | None
    start_position: int
    holds_rows = True

    def row(self, index: int, *, is_own: bool = True) -> BlockCache:
        assert self.keys is not None and self.values is not None
        taken, cut = BlockCache(self.chunk_size), row_of(index, is_own=is_own)
        taken.keys, taken.values = cut(self.keys), cut(self.values)
        taken.offset, taken.start_position = self.offset, self.start_position
        return taken

    def maybe_trim_front(self) -> None:
        """Drop blocks that no later token sees."""
        start = self.offset // self.chunk_size * self.chunk_size
        if self.keys is not None and start > self.start_position:
            kept = slice(start - self.start_position, self.offset - self.start_position)
            self.keys, self.values = self.keys[..., kept, :], self.values[..., kept, :]  # type: ignore[index]
            self.start_position = start

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        self.maybe_trim_front()
        return super().update_and_fetch(keys, values)

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | None:
        """Return the mask (L, K) of new tokens; None if they see all."""
        self.maybe_trim_front()
        if length == 1:
            return None
        columns = mx.arange(self.start_position, self.offset + length)[None]
        rows = mx.arange(self.offset, self.offset + length)[:, None]
        return (columns <= rows) & (
            columns // self.chunk_size == rows // self.chunk_size
        )

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        if self.keys is None:
            return None, None
        kept = self.offset - self.start_position
        return self.keys[..., :kept, :], self.values[..., :kept, :]  # type: ignore[index]

    def saved(self, length: int) -> BlockState:
        keys, values = self.state
        assert keys is not None and values is not None
        return BlockState(
            own_array(keys),
            own_array(values),
            self.offset,
            self.start_position,
            self.chunk_size,
        )

    def bytes_at(self, tokens: int, seen: int) -> int:
        kept = max(1, self.offset - self.start_position)
        return num_bytes(self.state) * min(tokens, self.chunk_size) // kept

    def batched(self, placement: Placement, num_places: int) -> LayerCache:
        if placement is Placement.SLAB:
            return BlockSlabCache(num_places, self.chunk_size)
        return RowsCache()


@filed
@dataclass(frozen=True)
class BlockState(LayerState):
    """Keys and values from position ``start`` on, in blocks of ``block``."""

    keys: mx.array  # (1, H, length - start, D)
    values: mx.array
    length: int
    start: int
    block: int

    def reaches(self, length: int) -> bool:
        return self.start < length <= self.length

    def restore(self, length: int) -> BlockCache:
        cache, kept = BlockCache(self.block), length - self.start
        cache.keys, cache.values = self.keys[:, :, :kept], self.values[:, :, :kept]
        cache.offset, cache.start_position = length, self.start
        return cache


class BlockSlabCache(RingSlabCache):
    """A slab of current blocks: position p is in column p mod block.

    Older columns are masked until overwritten.
    """

    def __init__(self, num_places: int, window: int) -> None:
        super().__init__(num_places, window)
        self.most_positions = 1

    def extract(self, place: int) -> BlockCache:
        cache = BlockCache(self.window)
        cache.offset = self._lengths[place]
        cache.start_position = (cache.offset - 1) // self.window * self.window
        kept = cache.offset - cache.start_position
        cache.keys, cache.values = (
            self._row(slab, place, 0, kept) for slab in (self.keys, self.values)
        )
        return cache

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | None:
        return SlabCache.make_mask(self, length)

    def _is_uniform(self, window_size: int | None) -> bool:
        return False

    def seen(self, offset: mx.array, count: int, window_size: int | None) -> mx.array:
        columns = mx.arange(self._columns(1))[None]
        return (columns <= self._positions()[:, None])[:, None, None, :]

    def _ordered(self, cache: Any) -> tuple[mx.array, mx.array]:
        return cache.state
