"""The caches of one row's layer that a model's attention reads together, and that a batch therefore keeps together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import CacheList

from vlm_batch.arrays import arrays_of
from vlm_batch.caches.layers import CacheKind, kind_of
from vlm_batch.caches.listed import ListState
from vlm_batch.caches.states import CopiedState, LayerState, can_file, filed


class WholeCache(CacheKind, CacheList):
    """mlx-vlm's ``CacheList`` of one row that no batch takes apart: the layer is run a row at a time.

    For layers whose parts choose among each other's positions (indexers, pools of compressed keys).
    """

    @property
    def offset(self) -> int:
        """The number of tokens that the row has seen."""
        return int(self.caches[0].offset)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """Every array that is held."""
        return arrays_of(self.state)

    def bytes_at(self, tokens: int, seen: int) -> int:
        return self.nbytes * tokens // max(1, seen)

    def saved(self, length: int) -> LayerState:
        """Its parts' states; a copy where one is of a kind that we do not know: parts beside it may count pools for tokens."""
        states = tuple(kind_of(part).saved(length) for part in self.caches)
        return WholeState(states) if all(map(can_file, states)) else CopiedState.of(self, length)


@filed
@dataclass(frozen=True)
class WholeState(ListState):
    """A layer with several caches that no batch takes apart."""

    def restore(self, length: int) -> Any:
        return WholeCache(*super().restore(length).caches)
