"""Caches of a layer that its attention reads together."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from mlx_vlm.models.cache import CacheList, KVCache, PoolingCache

from vlm_batch.arrays import num_bytes
from vlm_batch.caches.drafted import NO_LIMIT
from vlm_batch.caches.layers import CacheKind, UpstreamKind, kind_of, row_of, upstream
from vlm_batch.caches.listed import ListState
from vlm_batch.caches.states import CopiedState, LayerState, can_file, filed


class WholeCache(CacheKind, CacheList):
    """A ``CacheList`` of a layer that runs row by row: its parts select each other's positions."""

    # the parts' offsets before a forward with drafts
    _before: tuple[int, ...] | None = None

    @property
    def offset(self) -> int:
        return int(self.caches[0].offset)

    @property
    def holds_rows(self) -> bool:
        return all(kind_of(part).holds_rows for part in self.caches)

    def row(self, index: int, *, is_own: bool = True) -> WholeCache:
        return WholeCache(
            *(kind_of(part).row(index, is_own=is_own) for part in self.caches)
        )

    def most_positions(self, *, is_fixed: bool) -> int:
        can_drop = all(type(part) in (KVCache, PoolingCache) for part in self.caches)
        return NO_LIMIT if can_drop else 1

    def draft(self, count: int) -> None:
        self._before = tuple(int(part.offset) for part in self.caches)
        for part in self.caches:
            kind_of(part).draft(count)

    def keep(self, kept: int, of: int) -> None:
        assert self._before is not None
        for part, before in zip(self.caches, self._before, strict=True):
            # decode steps leave some parts as they are
            kind_of(part).keep(kept, int(part.offset) - before)
        self._before = None

    @property
    def nbytes(self) -> int:
        return num_bytes(self.state)

    def saved(self, length: int) -> LayerState:
        """Save the parts; copy all if one is of an unknown class."""
        states = tuple(kind_of(part).saved(length) for part in self.caches)
        if all(map(can_file, states)):
            return WholeState(states)
        return CopiedState.of(self, length)


@upstream(PoolingCache)
class PoolingKind(UpstreamKind):
    cache: PoolingCache
    holds_rows = True

    def row(self, index: int, *, is_own: bool = True) -> PoolingCache:
        taken, cut = copy.copy(self.cache), row_of(index, is_own=is_own)
        for name in ("buf_kv", "buf_gate", "pooled"):
            held = getattr(taken, name)
            setattr(taken, name, None if held is None else cut(held))
        return taken

    def draft(self, count: int) -> None:
        self.cache.start_speculation(count)

    def keep(self, kept: int, of: int) -> None:
        self.cache.commit_speculation(kept)


@filed
@dataclass(frozen=True)
class WholeState(ListState):
    def restore(self, length: int) -> Any:
        return WholeCache(*super().restore(length).caches)
