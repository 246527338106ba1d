"""The KV of one row's cross-attention layer: made once from its pictures, never appended to."""

from __future__ import annotations

import mlx.core as mx


class CrossCache:
    """Keys and values (1, H, T, D) of T picture positions; none for a row without pictures.

    It has its own length, apart from the row's tokens; a batch keeps one per row (``RowsCache``).
    """

    def __init__(self) -> None:
        self.state: tuple[mx.array, mx.array] | tuple[None, None] = (None, None)

    def hold(self, keys: mx.array, values: mx.array) -> None:
        """Take what the layer made of the row's pictures."""
        self.state = (keys, values)

    def keep(self, positions: mx.array) -> None:
        """Drop all picture positions but these (K,), once no token can see the others any more."""
        keys, values = self.state
        if keys is not None and values is not None:
            self.state = (keys[:, :, positions], values[:, :, positions])

    @property
    def offset(self) -> int:
        """How many picture positions there are."""
        keys = self.state[0]
        return 0 if keys is None else int(keys.shape[2])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state if array is not None)
