"""Cross-attention: keys and values of one row's pictures."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from vlm_batch.arrays import num_bytes, own_array
from vlm_batch.caches.layers import CacheKind
from vlm_batch.caches.states import LayerState, filed


class CrossCache(CacheKind):
    """Keys and values (1, H, T, D) of T picture positions, or none."""

    is_whole = True
    is_constant = True

    def __init__(self) -> None:
        self.state: tuple[mx.array, mx.array] | tuple[None, None] = (None, None)

    def hold(self, keys: mx.array, values: mx.array) -> None:
        self.state = (keys, values)

    def select(self, positions: mx.array) -> None:
        """Drop all picture positions but these (K,)."""
        keys, values = self.state
        if keys is not None and values is not None:
            self.state = (keys[:, :, positions], values[:, :, positions])

    @property
    def offset(self) -> int:
        keys = self.state[0]
        return 0 if keys is None else int(keys.shape[2])

    @property
    def nbytes(self) -> int:
        return num_bytes(self.state)

    def bytes_at(self, tokens: int, seen: int) -> int:
        return self.nbytes

    def saved(self, length: int) -> CrossState:
        keys, values = self.state
        if keys is None or values is None:
            return CrossState(None, None)
        return CrossState(own_array(keys), own_array(values))


@filed
@dataclass(frozen=True)
class CrossState(LayerState):
    """Keys and values (1, H, T, D) of pictures with equal shares of T."""

    keys: mx.array | None
    values: mx.array | None
    is_whole = True

    def of_pictures(self, share: float) -> CrossState:
        nothing = CrossState(None, None)
        if share == 0:
            return nothing
        if self.keys is None or self.values is None:
            return nothing
        kept = round(int(self.keys.shape[2]) * share)
        return CrossState(self.keys[:, :, :kept], self.values[:, :, :kept])

    def reaches(self, length: int) -> bool:
        return True

    def restore(self, length: int) -> CrossCache:
        cache = CrossCache()
        if self.keys is not None and self.values is not None:
            cache.hold(self.keys[...], self.values[...])
        return cache
