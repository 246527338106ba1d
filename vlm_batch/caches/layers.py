"""The contract of a kind of cache, of a row's cache and of a batch's, and the registry.

A kind is one file with three classes: one row's cache (``CacheKind``), its saved state (``states.LayerState``), and a
batch's (``LayerCache``; ``RowsCache`` serves any kind). A class of mlx-vlm's is registered by ``upstream`` instead. Whoever
writes a kind need not read the other files here; ``window.py`` is an example over a class of mlx-vlm's, ``retained.py`` of
a class of its own, ``recurrent.RecurrentCache`` of a batch's.

The model's layer sees one row's cache or a batch's, and calls what it has always called: ``update_and_fetch``, ``offset``,
``make_mask``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

from vlm_batch.arrays import num_bytes
from vlm_batch.caches.drafted import NO_LIMIT
from vlm_batch.caches.states import CopiedState, LayerState, LostState, is_cache
from vlm_batch.policy import POLICIES
from vlm_batch.runtime.device import device


class Placement(Enum):
    """The layout of a batch: ``ROWS`` for CPUs, ``SLAB`` for GPUs."""

    ROWS = "rows"
    SLAB = "slab"

    @classmethod
    def for_device(cls) -> Placement:
        return cls(POLICIES[device()].placement)


class LayerCache:
    """One layer of a batch: the states of the rows at its places.

    A kind writes ``put``, ``extract``, ``clear``, ``keep_places``, ``resize`` and ``arrays``. The rest says what else it
    can: ``drafted`` and ``keep`` go with ``most_positions``; ``graph_key``, ``step_inputs``, ``trace``, ``give`` and
    ``take`` with ``can_trace`` (``SlabCache``); ``span`` and ``cut`` with ``capacity``.
    """

    #: Whether keys and values lie in columns that are reserved ahead.
    has_columns = False
    #: Whether every step masks columns, so that rows attend apart.
    always_masked = False

    def configure(
        self,
        columns: Callable[[int], int],
        few_bits: str,
        *,
        always_masked: bool = False,
    ) -> None:
        """Set its rules.

        Args:
            columns: A slab's capacity by its longest row.
            few_bits: The policy's form of quantised states.
            always_masked: Every step masks columns and rows attend apart, to be batch-invariant.
        """
        self.columns = columns
        self.few_bits = few_bits
        self.always_masked = always_masked

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    @property
    def capacity(self) -> int:
        """Those columns, once there are some."""
        return 0

    @property
    def can_trace(self) -> bool:
        """Whether a compiled step can write it."""
        return False

    @property
    def has_graphs_kernels(self) -> bool:
        """Whether that runs the same kernels: nothing can be fused."""
        return False

    @property
    def most_positions(self) -> int:
        """The most positions of a row in one forward; 1 if none can be dropped."""
        return 1

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that each further position leaves."""
        return 0

    def put(self, place: int, cache: Any) -> None:
        """Take over one row's cache at an empty place. No other row is copied.

        It may raise where memory ends; then the place is cleared.
        """
        raise NotImplementedError

    def extract(self, place: int) -> Any:
        """Return the cache of the row at a place, which leaves next, in arrays of its own."""
        raise NotImplementedError

    def clear(self, place: int) -> None:
        """Free a place, which may be empty."""
        raise NotImplementedError

    def keep_places(self, places: list[int]) -> None:
        """Keep these places alone, in their order."""
        raise NotImplementedError

    def resize(self, num_places: int) -> None:
        """Cut or add empty places at the end."""
        raise NotImplementedError

    def arrays(self) -> list[mx.array]:
        """Return all arrays, for evaluation and counting."""
        raise NotImplementedError

    def drafted(self, counts: Sequence[int]) -> Any:
        """Return its view for ``counts[p]`` positions of place p."""

    def keep(self, place: int, kept: int, of: int) -> None:
        """Keep the first ``kept`` of a place's ``of`` positions."""


class CacheKind:
    """One row's cache of a layer.

    A kind writes ``state``, ``offset`` (the tokens that it has seen), ``nbytes``, ``saved``, and what its layer calls.
    Each of the rest says what else it can, and has a default that is right for any kind.
    """

    #: All arrays, for evaluation.
    state: Any

    #: Whether it only holds pictures, which tokens do not change.
    is_constant = False

    @property
    def is_whole(self) -> bool:
        """Whether it can be cut to any length."""
        return False

    @property
    def holds_rows(self) -> bool:
        """Whether a new one can hold several rows of one length."""
        return False

    @property
    def can_trim(self) -> bool:
        """Whether the last chunk's last positions can be removed without a trace."""
        return False

    @property
    def span(self) -> int | None:
        """The sliding window; None for full attention."""
        return None

    @property
    def counter(self) -> Any:
        """The cache whose ``offset`` counts its tokens."""
        return self

    @property
    def can_fill(self) -> bool:
        """Whether positions behind shorter rows of an array leave no trace."""
        return self.can_trim

    def row(self, index: int, *, is_own: bool = True) -> Any:
        """Return one row's cache; ``is_own`` copies its arrays."""
        raise NotImplementedError

    def trim(self, count: int) -> None:
        """Remove the last ``count`` positions of the last chunk."""
        raise NotImplementedError

    def most_positions(self, *, is_fixed: bool) -> int:
        """Return the most positions of one forward, some of which may be dropped; 1 if none can.

        ``is_fixed``: what is left must have the same bits.
        """
        return NO_LIMIT if self.can_trim else 1

    def draft(self, count: int) -> None:
        """Prepare for ``count`` positions, not all of which may be kept."""

    def keep(self, kept: int, of: int) -> None:
        """Keep the first ``kept`` of the last ``of`` positions."""
        if of > kept:
            self.trim(of - kept)

    def saved(self, length: int) -> LayerState:
        """Return the state after ``length`` tokens, as unevaluated copies."""
        return CopiedState.of(self, length)

    def batched(self, placement: Placement, num_places: int) -> LayerCache:
        """Make an empty batch cache for this kind."""
        from vlm_batch.caches.rows import RowsCache  # which asks the kinds

        return RowsCache()

    def bytes_at(self, tokens: int, seen: int) -> int:
        """Estimate the bytes at ``tokens`` from those at ``seen``."""
        return num_bytes(self.state) * tokens // max(1, seen)

    def full_parts(self) -> tuple[KVCache, ...]:
        """Return the full-attention caches in it."""
        return ()

    def with_full(self, change: Callable[[KVCache], Any]) -> Any:
        """Replace full-attention caches by ``change``."""
        return self


class UpstreamKind(CacheKind):
    """A cache of mlx-vlm's, wrapped; subclasses are registered by ``upstream``.

    Of a class without one, a row is copied attribute by attribute and stays in memory.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    @property
    def counter(self) -> Any:
        return self.cache

    def saved(self, length: int) -> LayerState:
        return (
            CopiedState.of(self.cache, length) if is_cache(self.cache) else LostState()
        )

    def bytes_at(self, tokens: int, seen: int) -> int:
        if not is_cache(self.cache):
            return 0
        return num_bytes(self.cache.state) * tokens // max(1, seen)

    def with_full(self, change: Callable[[KVCache], Any]) -> Any:
        return self.cache


Kind = TypeVar("Kind", bound=type[UpstreamKind])

#: mlx-vlm's single-row classes -> kinds. Subclasses do not count, as they may hold something else.
UPSTREAM_KINDS: dict[type, type[UpstreamKind]] = {}


def upstream(cache: type) -> Callable[[Kind], Kind]:
    """Register the kind for a class of mlx-vlm's; ``verified.py`` names those classes, too."""

    def register(kind: Kind) -> Kind:
        UPSTREAM_KINDS[cache] = kind
        return kind

    return register


def row_of(index: int, *, is_own: bool = True) -> Callable[[mx.array], mx.array]:
    """Return a function that selects a row of (R, ...); ``is_own`` copies it."""
    if not is_own:
        return lambda array: array[index : index + 1]
    at = mx.array([index])
    return lambda array: mx.take(array, at, axis=0)


def kind_of(cache: Any) -> CacheKind:
    """Return a single-row cache as ``CacheKind``, wrapped if needed."""
    if isinstance(cache, CacheKind):
        return cache
    return UPSTREAM_KINDS.get(type(cache), UpstreamKind)(cache)


def row_bytes(caches: Sequence[Any], tokens: int, seen: int) -> int:
    return sum(kind_of(cache).bytes_at(tokens, seen) for cache in caches)
