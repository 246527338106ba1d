"""The KV of the live rows: per layer, either one cache per row or one slab for all rows."""

from vlm_batch.caches.rows import RowMasks, RowsCache, RowStates, arrays_of
from vlm_batch.caches.slab import RingSlabCache, SlabCache
from vlm_batch.caches.store import LayerCache, Placement, make_layer_cache

__all__ = [
    "LayerCache",
    "Placement",
    "RingSlabCache",
    "RowMasks",
    "RowStates",
    "RowsCache",
    "SlabCache",
    "arrays_of",
    "make_layer_cache",
]
