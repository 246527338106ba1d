"""mlx-vlm's cache classes that are verified in batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mlx_vlm.models.cache import CacheList

from vlm_batch.errors import UnsupportedModel

#: Verified single-row classes, by exact name.
VERIFIED = frozenset(
    {
        "mlx_vlm.models.cache.ArraysCache",  # recurrent states
        "mlx_vlm.models.cache.CacheList",  # its parts must be known, too
        "mlx_vlm.models.cache.KVCache",
        "mlx_vlm.models.cache.RotatingKVCache",  # a sliding window
        "mlx_vlm.models.deepseek_v41.language.DeepseekV41Cache",  # all layers of a row
        "mlx_vlm.models.minimax_m3_vl.language.MiniMaxM3KVCache",  # with an indexer
    }
)


def check_caches(caches: Iterable[Any], *, family: str) -> None:
    """Raise UnsupportedModel for an unverified class of mlx-vlm's."""
    for cache in _flat(caches):
        name = f"{type(cache).__module__}.{type(cache).__qualname__}"
        is_upstream = name.startswith("mlx_vlm.")
        if is_upstream and name not in VERIFIED:
            raise UnsupportedModel(
                f"{family}: a layer keeps its keys and values in a {name}, which this version of vlm_batch has not been "
                "verified with"
            )


def _flat(caches: Iterable[Any]) -> Iterator[Any]:
    for cache in caches:
        yield cache
        if type(cache) is CacheList:
            yield from _flat(cache.caches)
