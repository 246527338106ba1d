"""The caches of one row's layer that a model's attention reads together, and that a batch therefore keeps together."""

from __future__ import annotations

import mlx.core as mx
from mlx_vlm.models.cache import CacheList

from vlm_batch.arrays import arrays_of


class WholeCache(CacheList):
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
