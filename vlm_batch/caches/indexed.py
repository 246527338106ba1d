"""One row's keys and values, and an indexer that selects positions (Qwen4-Exp)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

from vlm_batch.arrays import grown, num_bytes, own_array, round_up
from vlm_batch.caches.layers import CacheKind, kind_of, row_of
from vlm_batch.caches.states import LayerState, filed

#: Growth of the index, in columns.
STEP = 256
#: The axes of positions: time, height and width.
AXES = 3


class IndexedCache(CacheKind):
    """Keys and values in ``inner``, perhaps quantised; an indexer's key and position per token.

    mlx-vlm's ``QSAKVCache`` copies its whole index for every token.
    """

    def __init__(self, inner: Any = None) -> None:
        self.inner = KVCache() if inner is None else inner
        self.index_offset = 0
        #: (B, 1, N, D) keys of whole blocks, made by the attention, and a block's number of tokens.
        self.index_block_keys: mx.array | None = None
        self.index_block_ratio: int | None = None
        self._keys: mx.array | None = None  # (B, capacity, D)
        self._positions: mx.array | None = None  # (3, B, capacity)

    def update_indexer(
        self, keys: mx.array, positions: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Append keys (B, L, D) at positions (B, L) or (3, B, L); return ``index``."""
        if positions.ndim == 2:
            positions = mx.broadcast_to(positions[None], (AXES, *positions.shape))
        start, end = self.index_offset, self.index_offset + keys.shape[1]
        if self._keys is None or self._positions is None or end > self._keys.shape[1]:
            width = round_up(end, STEP)
            self._keys = grown(
                self._keys,
                (len(keys), width, keys.shape[2]),
                keys.dtype,
                axis=1,
                kept=start,
            )
            self._positions = grown(
                self._positions, (AXES, len(keys), width), positions.dtype, kept=start
            )
        self._keys[:, start:end] = keys
        self._positions[..., start:end] = positions
        self.index_offset = end
        return self._keys[:, :end], self._positions[..., :end]

    @property
    def index(self) -> tuple[mx.array, mx.array]:
        """The indexer's keys (B, N, D) and positions (3, B, N); raises LookupError if empty."""
        if self._keys is None or self._positions is None:
            raise LookupError("the cache has seen no token")
        return self._keys[:, : self.index_offset], self._positions[
            ..., : self.index_offset
        ]

    @classmethod
    def of(cls, inner: Any, keys: mx.array, positions: mx.array) -> IndexedCache:
        cache = cls(inner)
        cache._keys = keys
        cache._positions = positions
        cache.index_offset = int(keys.shape[1])
        return cache

    @property
    def holds_rows(self) -> bool:
        return kind_of(self.inner).holds_rows

    def row(self, index: int, *, is_own: bool = True) -> IndexedCache:
        keys, positions = self.index
        cut = row_of(index, is_own=is_own)
        taken = IndexedCache.of(
            kind_of(self.inner).row(index, is_own=is_own),
            cut(keys),
            cut(positions.swapaxes(0, 1)).swapaxes(0, 1),
        )
        if self.index_block_keys is not None:
            taken.index_block_keys = cut(self.index_block_keys)
            taken.index_block_ratio = self.index_block_ratio
        return taken

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self.inner.update_and_fetch(keys, values)

    @property
    def counter(self) -> Any:
        return kind_of(self.inner).counter

    def most_positions(self, *, is_fixed: bool) -> int:
        return kind_of(self.inner).most_positions(is_fixed=is_fixed)

    def trim(self, count: int) -> None:
        kind_of(self.inner).trim(count)
        self.index_offset -= count
        if self.index_block_keys is not None and self.index_block_ratio is not None:
            self.index_block_keys = self.index_block_keys[
                :, :, : self.index_offset // self.index_block_ratio
            ]

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> Any:
        return self.inner.make_mask(
            length, window_size=window_size, return_array=return_array
        )

    @property
    def offset(self) -> int:
        return int(self.inner.offset)

    @property
    def state(self) -> list[Any]:
        own = (self._keys, self._positions, self.index_block_keys)
        held = [array for array in own if array is not None]
        return [self.inner.state if self.offset else None, *held]

    @property
    def nbytes(self) -> int:
        own = (self._keys, self._positions, self.index_block_keys)
        return int(self.inner.nbytes) + num_bytes(own)

    @property
    def is_whole(self) -> bool:
        return kind_of(self.inner).is_whole

    def saved(self, length: int) -> IndexedState:
        return IndexedState(
            kind_of(self.inner).saved(length), *(own_array(part) for part in self.index)
        )

    def full_parts(self) -> tuple[KVCache, ...]:
        return kind_of(self.inner).full_parts()

    def with_full(self, change: Callable[[KVCache], Any]) -> IndexedCache:
        return IndexedCache(kind_of(self.inner).with_full(change))


@filed
@dataclass(frozen=True)
class IndexedState(LayerState):
    state: LayerState
    index_keys: mx.array
    positions: mx.array

    @property
    def is_whole(self) -> bool:
        return self.state.is_whole

    @property
    def floor(self) -> int:
        return self.state.floor

    def reaches(self, length: int) -> bool:
        return self.state.reaches(length)

    def restore(self, length: int) -> IndexedCache:
        inner = self.state.restore(length)
        return IndexedCache.of(
            inner, self.index_keys[:, :length], self.positions[..., :length]
        )
