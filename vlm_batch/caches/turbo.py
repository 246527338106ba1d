"""Full attention coded by mlx-vlm's TurboQuant (arXiv:2504.19874)."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from mlx_vlm.turboquant import (
    TurboQuantKVCache,
    TurboQuantMSEState,
    _QuantizedStateProxy,
)

from vlm_batch.arrays import own_array
from vlm_batch.caches.layers import CacheKind
from vlm_batch.caches.states import LayerState, filed


class TurboStates(_QuantizedStateProxy):  # type: ignore[misc]
    """Coded keys or values, and the cache whose kernels read them."""

    __slots__ = ("cache",)

    def __init__(self, states: _QuantizedStateProxy, cache: TurboCache) -> None:
        super().__init__(states._state, states.shape[2], states.shape[1])
        self.cache = cache


class TurboCache(CacheKind, TurboQuantKVCache):  # type: ignore[misc]
    is_whole = True

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[TurboStates, TurboStates]:
        coded_keys, coded_values = super().update_and_fetch(keys, values)
        return TurboStates(coded_keys, self), TurboStates(coded_values, self)

    def saved(self, length: int) -> TurboState:
        keys, values = (
            tuple(own_array(part[:, :, : self.offset]) for part in state)
            for state in (self.keys, self.values)
        )
        return TurboState(keys, values, self.bits, self.seed)


@filed
@dataclass(frozen=True)
class TurboState(LayerState):
    """Norms (1, H, L) and codes (1, H, L, W) of keys and of values."""

    keys: tuple[mx.array, ...]
    values: tuple[mx.array, ...]
    bits: float
    seed: int
    is_whole = True

    def reaches(self, length: int) -> bool:
        return length <= int(self.keys[0].shape[2])

    def restore(self, length: int) -> TurboCache:
        cache = TurboCache(bits=self.bits, seed=self.seed)
        cache.keys, cache.values = (
            TurboQuantMSEState(*(part[:, :, :length] for part in parts))
            for parts in (self.keys, self.values)
        )
        cache.offset = length
        return cache
