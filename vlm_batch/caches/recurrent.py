"""One recurrent layer of a batch (state-space, linear attention, short convolution): a state of fixed size for each row."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache


class RecurrentCache(ArraysCache):
    """The rows' states side by side: slot i holds (B, ...), whatever the placement. An empty place's state is never read.

    To a model it is mlx-vlm's ``ArraysCache`` of B rows without padding. A decode step makes every state anew, so a
    join or a leave, which writes one row or closes its gap, costs no more than a step writes; no KV is involved.
    """

    cache: list[Any]

    def __init__(self) -> None:
        super().__init__(0)

    def put(self, place: int, cache: ArraysCache) -> None:
        """Take over one row's states (1, ...); a slot that the row has not filled begins with zeros."""
        self.cache = self.cache or [None] * len(cache.cache)
        self.cache = [_put(states, place, row) for states, row in zip(self.cache, cache.cache, strict=True)]

    def clear(self, place: int) -> None:
        """Free a place; its state stays until another row's is written over it."""

    def remove(self, place: int) -> None:
        """Forget the row at a place and close the gap."""
        self.cache = [
            None if states is None else mx.concatenate([states[:place], states[place + 1 :]]) for states in self.cache
        ]

    def truncate(self, num_places: int) -> None:
        """Keep the first places only (the others are empty)."""
        self.cache = [None if states is None else states[:num_places] for states in self.cache]

    def arrays(self) -> list[mx.array]:
        """Every array that is held, to be evaluated."""
        return [states for states in self.cache if states is not None]


def _put(states: Any, place: int, row: Any) -> Any:
    """``states`` (B, ...) with ``row`` (1, ...) at a place, at most one past the last."""
    if states is None and row is None:
        return None
    if states is None:
        states = mx.zeros((place, *row.shape[1:]), row.dtype)
    elif row is None:
        row = mx.zeros((1, *states.shape[1:]), states.dtype)
    return mx.concatenate([states[:place], row, states[place + 1 :]])
