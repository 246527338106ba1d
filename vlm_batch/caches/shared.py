"""A cache that several prompts of one length were prefilled into, taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_vlm.models.cache import KVCache


def can_share(caches: Sequence[Any]) -> bool:
    """Whether fresh caches are plain keys and values, which hold several rows as well as one."""
    return all(type(cache) is KVCache for cache in caches)


def take_row(caches: Sequence[KVCache], row: int) -> list[KVCache]:
    """One row's single-row caches; the keys and values are views until somebody writes."""
    return [_take(cache, row) for cache in caches]


def _take(cache: KVCache, row: int) -> KVCache:
    taken = KVCache()
    taken.keys, taken.values = cache.keys[row : row + 1], cache.values[row : row + 1]
    taken.offset = cache.offset
    return taken
