"""Which cache serves a layer, and the protocol that all of them follow."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

import mlx.core as mx
from mlx_vlm.models.cache import KVCache, RotatingKVCache

from vlm_batch.caches.rows import RowsCache
from vlm_batch.caches.slab import RingSlabCache, SlabCache


class Placement(Enum):
    """How the rows of a batch are laid out. ``ROWS`` pays per row, ``SLAB`` per step: CPU and GPU respectively."""

    ROWS = "rows"
    SLAB = "slab"

    @classmethod
    def for_device(cls) -> Placement:
        """The measured choice for the device that MLX runs on (docs/architecture.md, decode state)."""
        return cls.SLAB if mx.default_device().type == mx.DeviceType.gpu else cls.ROWS


class LayerCache(Protocol):
    """One layer of the batch. Places are numbered from 0; an empty place has length 0."""

    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> mx.array: ...
    @property
    def nbytes(self) -> int: ...
    def put(self, place: int, cache: Any) -> None: ...
    def take(self, place: int) -> Any: ...
    def clear(self, place: int) -> None: ...
    def resize(self, num_places: int) -> None: ...
    def arrays(self) -> list[mx.array]: ...


def make_layer_cache(single: Any, placement: Placement, num_places: int) -> LayerCache:
    """The batch cache for a layer whose single-row cache is ``single``; kinds without a slab keep one cache per row."""
    if placement is Placement.SLAB and type(single) is KVCache:
        return SlabCache(num_places)
    if placement is Placement.SLAB and type(single) is RotatingKVCache and single.keep == 0:
        return RingSlabCache(num_places, single.max_size)
    return RowsCache()
