"""The state of live rows, per layer: single-row caches, slabs or recurrent states."""

import importlib
import pkgutil

from vlm_batch.caches.blocks import BlockCache, BlockSlabCache
from vlm_batch.caches.full import can_fill, can_share, can_trim, take_row, trim
from vlm_batch.caches.indexed import IndexedCache
from vlm_batch.caches.layers import LayerCache, Placement, kind_of
from vlm_batch.caches.listed import ListedCache, equalise_capacity
from vlm_batch.caches.pooled import PoolCache
from vlm_batch.caches.recurrent import RecurrentCache
from vlm_batch.caches.rows import RowMasks, RowsCache, RowStates
from vlm_batch.caches.slab import RingSlabCache, SlabCache
from vlm_batch.caches.whole import WholeCache

__all__ = [
    "BlockCache",
    "BlockSlabCache",
    "IndexedCache",
    "LayerCache",
    "ListedCache",
    "Placement",
    "PoolCache",
    "RecurrentCache",
    "RingSlabCache",
    "RowMasks",
    "RowStates",
    "RowsCache",
    "SlabCache",
    "WholeCache",
    "can_fill",
    "can_share",
    "can_trim",
    "equalise_capacity",
    "kind_of",
    "take_row",
    "trim",
]

for _module in pkgutil.iter_modules(__path__):  # every kind registers itself on import
    importlib.import_module(f"{__name__}.{_module.name}")
