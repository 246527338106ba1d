"""The KV of one row's cross-attention layer: made once from its pictures, never appended to."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from vlm_batch.arrays import own_array
from vlm_batch.caches.layers import CacheKind
from vlm_batch.caches.states import LayerState, filed


class CrossCache(CacheKind):
    """Keys and values (1, H, T, D) of T picture positions; none for a row without pictures.

    It has its own length, apart from the row's tokens; a batch keeps one per row (``RowsCache``).
    """

    is_whole = True
    is_constant = True

    def __init__(self) -> None:
        self.state: tuple[mx.array, mx.array] | tuple[None, None] = (None, None)

    def hold(self, keys: mx.array, values: mx.array) -> None:
        """Take the keys and values that the layer made of the row's pictures."""
        self.state = (keys, values)

    def keep(self, positions: mx.array) -> None:
        """Drop all picture positions but these (K,), once no token can see the others any more."""
        keys, values = self.state
        if keys is not None and values is not None:
            self.state = (keys[:, :, positions], values[:, :, positions])

    @property
    def offset(self) -> int:
        """The number of picture positions."""
        keys = self.state[0]
        return 0 if keys is None else int(keys.shape[2])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state if array is not None)

    def bytes_at(self, tokens: int, seen: int) -> int:
        return self.nbytes

    def saved(self, length: int) -> CrossState:
        return CrossState(*(None if part is None else own_array(part) for part in self.state))


@filed
@dataclass(frozen=True)
class CrossState(LayerState):
    """Cross-attention: keys and values (1, H, T, D) of pictures that take equal shares of T. It has no tokens to cut."""

    keys: mx.array | None
    values: mx.array | None
    is_whole = True

    def of_pictures(self, share: float) -> CrossState:
        if self.keys is None or self.values is None or share == 0:
            return CrossState(None, None)
        kept = round(int(self.keys.shape[2]) * share)
        return CrossState(self.keys[:, :, :kept], self.values[:, :, :kept])

    def reaches(self, length: int) -> bool:
        return True

    def restore(self, length: int) -> CrossCache:
        cache = CrossCache()
        if self.keys is not None and self.values is not None:
            cache.hold(self.keys[...], self.values[...])
        return cache
