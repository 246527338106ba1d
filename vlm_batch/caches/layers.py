"""Which cache serves a layer, and the protocol that all of them follow."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from vlm_batch.caches.blocks import BlockCache, BlockSlabCache
from vlm_batch.caches.listed import ListedCache
from vlm_batch.caches.quantized import QuantizedCache, QuantizedSlabCache
from vlm_batch.caches.recurrent import RecurrentCache
from vlm_batch.caches.rows import RowsCache
from vlm_batch.caches.slab import RingSlabCache, SlabCache
from vlm_batch.caches.whole import WholeCache


class Placement(Enum):
    """How the rows of a batch are laid out. ``ROWS`` pays per row, ``SLAB`` per step: CPU and GPU respectively."""

    ROWS = "rows"
    SLAB = "slab"

    @classmethod
    def for_device(cls) -> Placement:
        """The measured choice for the device that MLX runs on (docs/architecture.md, decode state)."""
        return cls.SLAB if mx.default_device().type == mx.DeviceType.gpu else cls.ROWS


class LayerCache(Protocol):
    """One layer of the batch. Places are numbered from 0. What else a model asks of it depends on its kind."""

    @property
    def nbytes(self) -> int: ...
    def put(self, place: int, cache: Any) -> None: ...
    def take(self, place: int) -> Any: ...
    def clear(self, place: int) -> None: ...
    def resize(self, num_places: int) -> None: ...
    def arrays(self) -> list[mx.array]: ...


@runtime_checkable
class DenseCache(Protocol):
    """A layer whose places can close up, as ``Placement.ROWS`` needs."""

    def remove(self, place: int) -> None: ...


def make_layer_cache(single: Any, placement: Placement, num_places: int) -> LayerCache:
    """The batch cache for a layer whose single-row cache is ``single``; kinds without a slab keep one cache per row."""
    if isinstance(single, WholeCache):
        return RowsCache()
    if isinstance(single, CacheList):
        return ListedCache(*(make_layer_cache(part, placement, num_places) for part in single.caches))
    if type(single) is ArraysCache:
        return RecurrentCache()
    if placement is Placement.SLAB and type(single) is KVCache:
        return SlabCache(num_places)
    if placement is Placement.SLAB and type(single) is QuantizedCache:
        return QuantizedSlabCache(num_places, single.group_size, single.bits)
    if placement is Placement.SLAB and type(single) is RotatingKVCache and single.keep == 0:
        return RingSlabCache(num_places, single.max_size)
    if placement is Placement.SLAB and type(single) is BlockCache:
        return BlockSlabCache(num_places, single.chunk_size)
    return RowsCache()
