"""Caches of a layer, of one row and of a batch: the protocols that they follow, and the registry of mlx-vlm's.

A kind of cache is one file beside this one: the single-row cache, how it is saved, and the batch's cache for it. Our
own single-row caches inherit ``CacheKind``; mlx-vlm's are wrapped in one that is registered for their class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol, TypeVar, runtime_checkable

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

from vlm_batch.arrays import arrays_of
from vlm_batch.caches.rows import RowsCache
from vlm_batch.caches.states import CopiedState, LayerState, LostState, is_cache
from vlm_batch.policy import POLICIES
from vlm_batch.runtime.device import device


class Placement(Enum):
    """The layout of a batch's rows. ``ROWS`` pays per row, ``SLAB`` per step: CPU and GPU respectively."""

    ROWS = "rows"
    SLAB = "slab"

    @classmethod
    def for_device(cls) -> Placement:
        """The choice for the device that MLX runs on."""
        return cls(POLICIES[device()].placement)


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


class CacheKind:
    """One row's cache of a layer, with the questions that the engine asks. The defaults are for a kind that is kept by row."""

    #: Every array that is held, to be evaluated.
    state: Any

    #: Whether it can be cut back to any length.
    is_whole = False
    #: Whether no token changes it once the row's pictures are in it.
    is_constant = False
    #: Whether a fresh one holds several rows of one length as well as one.
    holds_rows = False
    #: Whether the last positions of the chunk that went in last can be taken out again, as if they had not been in it.
    can_trim = False

    def row(self, index: int, *, is_own: bool = True) -> Any:
        """The single-row cache of one of these rows, with copies of its own, so that nothing keeps the others', or without."""
        raise NotImplementedError

    def trim(self, count: int) -> None:
        """Take out the last ``count`` positions of the chunk that went in last."""
        raise NotImplementedError

    def saved(self, length: int) -> LayerState:
        """Its state after ``length`` tokens. The state's arrays are copies, not evaluated yet."""
        return CopiedState.of(self, length)

    def batched(self, placement: Placement, num_places: int) -> LayerCache:
        """An empty cache of a batch for rows of this kind; kinds without a slab keep one cache a row."""
        return RowsCache()

    def bytes_at(self, tokens: int, seen: int) -> int:
        """Bytes that it will take at so many tokens, in proportion to what it takes now that the row has ``seen`` some."""
        return sum(array.nbytes for array in arrays_of(self.state)) * tokens // max(1, seen)

    def full_parts(self) -> tuple[KVCache, ...]:
        """The caches that can be quantised: those of full attention in it, or itself."""
        return ()

    def with_full(self, change: Callable[[KVCache], Any]) -> Any:
        """A fresh cache in which ``change`` has replaced those of full attention."""
        return self


class UpstreamKind(CacheKind):
    """Wraps a cache of mlx-vlm's. This class serves caches of unknown classes; subclasses serve registered ones."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def saved(self, length: int) -> LayerState:
        """A copy of the cache; a LostState if it is no cache of mlx-vlm's."""
        return CopiedState.of(self.cache, length) if is_cache(self.cache) else LostState()

    def bytes_at(self, tokens: int, seen: int) -> int:
        held = sum(array.nbytes for array in arrays_of(self.cache.state)) if is_cache(self.cache) else 0
        return held * tokens // max(1, seen)

    def with_full(self, change: Callable[[KVCache], Any]) -> Any:
        return self.cache


Kind = TypeVar("Kind", bound=type[UpstreamKind])

#: By the class of mlx-vlm's single-row caches: exactly these, since a subclass may hold something else.
UPSTREAM_KINDS: dict[type, type[UpstreamKind]] = {}


def upstream(cache: type) -> Callable[[Kind], Kind]:
    """Register the kind of a class of mlx-vlm's single-row caches."""

    def register(kind: Kind) -> Kind:
        UPSTREAM_KINDS[cache] = kind
        return kind

    return register


def kind_of(cache: Any) -> CacheKind:
    """A single-row cache as a ``CacheKind``: itself, or wrapped."""
    if isinstance(cache, CacheKind):
        return cache
    return UPSTREAM_KINDS.get(type(cache), UpstreamKind)(cache)


def row_bytes(caches: Sequence[Any], tokens: int, seen: int) -> int:
    """Bytes of a row's layers at so many tokens, judged by those that it has now that it has ``seen`` some."""
    return sum(kind_of(cache).bytes_at(tokens, seen) for cache in caches)
