"""Saved rows: states of their layers.

*Snapshots* save layers that are not whole, at chunk ends and turn boundaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.arrays import arrays_of, map_arrays, own_array
from vlm_batch.caches.layers import kind_of
from vlm_batch.caches.states import LayerState
from vlm_batch.store.budget import footprint

#: Bytes per position in the prefix cache's index.
INDEX_BYTES = 22


@dataclass(frozen=True)
class Snapshot:
    """Layers that are not whole, at one length, and the last token's logits (1, V), if known."""

    # by number, only those not whole
    layers: Mapping[int, LayerState] = field(default_factory=dict)
    logits: mx.array | None = None

    def reaches(self, length: int) -> bool:
        """Return whether every layer has a state of so many positions."""
        return all(layer.reaches(length) for layer in self.layers.values())

    def arrays(self) -> list[mx.array]:
        return [*arrays_of(self.logits), *_arrays_of(self.layers)]


#: Of a length at which nothing was saved.
_NOTHING = Snapshot()


@dataclass(frozen=True)
class SavedRow:
    """A row's state over the positions of ``keys`` (L, 3).

    ``whole`` holds whole layers by number, ``snapshots`` the others by length.
    """

    keys: np.ndarray
    num_layers: int
    whole: Mapping[int, LayerState]
    snapshots: Mapping[int, Snapshot]
    num_pictures: int = 0

    @property
    def length(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + sum(array.nbytes for array in self.arrays())

    @property
    def footprint(self) -> int:
        """Bytes in memory, with overhead and index."""
        each = self.keys.shape[1] * self.keys.itemsize + INDEX_BYTES
        return self.length * each + footprint(self.arrays())

    def arrays(self) -> list[mx.array]:
        found = _arrays_of(self.whole)
        for snapshot in self.snapshots.values():
            found += snapshot.arrays()
        return found

    def resumable(self, limit: int) -> int:
        """Return the largest length up to ``limit`` from which a row can continue, or 0."""
        longest = min(limit, self.length)
        if not self._is_whole:
            longest = self._last_end(limit)
        floors = [layer.floor for layer in self.whole.values()]
        return longest if longest >= max(floors, default=0) else 0

    @property
    def _is_whole(self) -> bool:
        return len(self.whole) == self.num_layers

    def _last_end(self, limit: int) -> int:
        """Return the largest length up to ``limit`` that a snapshot serves, or 0."""
        longest = 0
        for at, snapshot in self.snapshots.items():
            end = min(limit, at)
            if self._serves(snapshot, end):
                longest = max(longest, end)
        return longest

    def logits_at(self, length: int) -> mx.array | None:
        return self.snapshots.get(length, _NOTHING).logits

    def restore(self, length: int, num_pictures: int) -> list[Any]:
        """Make single-row caches of the first ``length`` positions and ``num_pictures``."""
        layers = dict(self.whole)
        if not self._is_whole:
            layers |= self._serving(length).layers
        share = num_pictures / max(1, self.num_pictures)
        return [
            layers[index].of_pictures(share).restore(length)
            for index in range(self.num_layers)
        ]

    def _serving(self, length: int) -> Snapshot:
        """Return the shortest snapshot from which a row can continue at ``length``."""
        for at in sorted(self.snapshots):
            snapshot = self.snapshots[at]
            if at >= length and self._serves(snapshot, length):
                return snapshot
        raise LookupError(f"no snapshot reaches {length} positions")

    def _serves(self, snapshot: Snapshot, length: int) -> bool:
        is_complete = len(self.whole) + len(snapshot.layers) == self.num_layers
        return is_complete and snapshot.reaches(length)


def _arrays_of(layers: Mapping[int, LayerState]) -> list[mx.array]:
    found: list[mx.array] = []
    for layer in layers.values():
        found += layer.arrays()
    return found


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Count the first positions shared by keys (N, 3), (M, 3)."""
    shared = min(len(one), len(other))
    begin, size = 0, 64
    while begin < shared:  # most rows differ early
        part = slice(begin, min(begin + size, shared))
        differs = (one[part] != other[part]).any(axis=1)
        if differs.any():
            return begin + int(differs.argmax())
        begin, size = begin + size, 4 * size
    return shared


def _states(
    caches: Sequence[Any], length: int, known: Mapping[int, LayerState]
) -> tuple[dict[int, LayerState], dict[int, LayerState]]:
    """Return the states of layers, by number: those that are whole, the ``known`` among them, and the others."""
    whole: dict[int, LayerState] = dict(known)
    others: dict[int, LayerState] = {}
    for index in range(len(caches)):
        if index not in known:
            state = kind_of(caches[index]).saved(length)
            states = whole if state.is_whole else others
            states[index] = state
    return whole, others


def save_snapshot(
    caches: Sequence[Any], length: int, logits: mx.array | None
) -> Snapshot:
    """Save the layers that are not whole, unevaluated."""
    _, layers = _states(caches, length, {})
    return Snapshot(layers, map_arrays(logits, own_array))


def save_row(
    caches: Sequence[Any],
    keys: np.ndarray,
    snapshots: Mapping[int, Snapshot],
    num_pictures: int,
    constant: Mapping[int, LayerState] | None = None,
) -> SavedRow:
    """Save a row's caches, unevaluated; ``constant``: layers saved already."""
    length = len(keys)
    whole, last = _states(caches, length, constant or {})
    kept = {at: snapshot for at, snapshot in snapshots.items() if at <= length}
    end = Snapshot(last, kept.get(length, _NOTHING).logits)
    if last and end.reaches(length):
        kept[length] = end
    return SavedRow(keys, len(caches), whole, kept, num_pictures)
