"""A cache that several prompts of one length were prefilled into, taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache


def can_share(caches: Sequence[Any]) -> bool:
    """Whether fresh caches are plain keys and values, which hold several rows as well as one."""
    return all(type(cache) is KVCache for cache in caches)


def take_row(caches: Sequence[KVCache], row: int) -> list[KVCache]:
    """One row's single-row caches, with copies of its own keys and values: nothing keeps the other rows'."""
    return [_take(cache, row) for cache in caches]


def _take(cache: KVCache, row: int) -> KVCache:
    taken = KVCache()
    place = mx.array([row])
    taken.keys, taken.values = mx.take(cache.keys, place, axis=0), mx.take(cache.values, place, axis=0)
    taken.offset = cache.offset
    return taken
