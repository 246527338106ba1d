"""The KV of the live rows: per layer, either one cache per row or one slab for all rows."""

from vlm_batch.caches.blocks import BlockCache, BlockSlabCache
from vlm_batch.caches.rows import RowMasks, RowsCache, RowStates
from vlm_batch.caches.slab import RingSlabCache, SlabCache
from vlm_batch.caches.store import LayerCache, Placement, make_layer_cache

__all__ = [
    "BlockCache",
    "BlockSlabCache",
    "LayerCache",
    "Placement",
    "RingSlabCache",
    "RowMasks",
    "RowStates",
    "RowsCache",
    "SlabCache",
    "make_layer_cache",
]
