"""The cache classes of mlx-vlm's that a batch has been verified with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mlx_vlm.models.cache import CacheList

from vlm_batch.errors import UnsupportedModel

#: Classes of one row's layer, by their names: mlx-vlm may rename or subclass them, and then they are others.
KNOWN = frozenset(
    {
        "mlx_vlm.models.cache.ArraysCache",  # recurrent states
        "mlx_vlm.models.cache.CacheList",  # several caches of one layer, each of which must be known
        "mlx_vlm.models.cache.KVCache",
        "mlx_vlm.models.cache.RotatingKVCache",  # a sliding window
        "mlx_vlm.models.deepseek_v41.language.DeepseekV41Cache",  # all layers of a row, kept a row each
        "mlx_vlm.models.minimax_m3_vl.language.MiniMaxM3KVCache",  # keys, values and those of an indexer, kept a row each
    }
)


def check_caches(caches: Iterable[Any], *, family: str) -> None:
    """Refuse a model with a layer whose cache is of a class of mlx-vlm's that no batch has been verified with.

    Without it such a layer would be kept a row at a time: slow where slabs are used, and wrong where the class keeps what
    rows must not share. An adapter's own classes are its own business. Raises UnsupportedModel, naming the class.
    """
    for cache in _flat(caches):
        name = f"{type(cache).__module__}.{type(cache).__qualname__}"
        if name.startswith("mlx_vlm.") and name not in KNOWN:
            raise UnsupportedModel(
                f"{family}: a layer keeps its keys and values in a {name}, which this version of vlm_batch has not been "
                "verified with"
            )


def _flat(caches: Iterable[Any]) -> Iterator[Any]:
    for cache in caches:
        yield cache
        if type(cache) is CacheList:
            yield from _flat(cache.caches)
