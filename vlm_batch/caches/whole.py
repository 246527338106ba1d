"""Caches of a layer that its attention reads together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import CacheList, KVCache, PoolingCache

from vlm_batch.arrays import arrays_of
from vlm_batch.caches.layers import CacheKind, kind_of
from vlm_batch.caches.listed import ListState
from vlm_batch.caches.states import CopiedState, LayerState, can_file, filed


class WholeCache(CacheKind, CacheList):
    """A ``CacheList`` of a layer that runs row by row: its parts select each other's positions."""

    _before: tuple[int, ...] | None = None  # the parts' offsets before a forward with drafts

    @property
    def offset(self) -> int:
        return int(self.caches[0].offset)

    @property
    def can_draft(self) -> bool:
        """Whether some of a forward's positions can be dropped."""
        return all(type(part) in (KVCache, PoolingCache) for part in self.caches)

    def draft(self, count: int) -> None:
        """Note what the next ``count`` positions begin with."""
        self._before = tuple(int(part.offset) for part in self.caches)
        for part in self.caches:
            if isinstance(part, PoolingCache):
                part.start_speculation(count)

    def keep(self, count: int) -> None:
        """Keep the first ``count`` of the positions since ``draft``."""
        assert self._before is not None
        for part, before in zip(self.caches, self._before, strict=True):
            if isinstance(part, PoolingCache):
                part.commit_speculation(count)
            else:  # decode steps leave some parts as they are
                part.offset = min(int(part.offset), before + count)
        self._before = None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        return arrays_of(self.state)

    def bytes_at(self, tokens: int, seen: int) -> int:
        return self.nbytes * tokens // max(1, seen)

    def saved(self, length: int) -> LayerState:
        """Save the parts; copy all if one is of an unknown class."""
        states = tuple(kind_of(part).saved(length) for part in self.caches)
        return WholeState(states) if all(map(can_file, states)) else CopiedState.of(self, length)


@filed
@dataclass(frozen=True)
class WholeState(ListState):
    def restore(self, length: int) -> Any:
        return WholeCache(*super().restore(length).caches)
