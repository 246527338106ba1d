"""Saved rows: states of their layers.

*Snapshots* save layers that are not whole, at chunk ends and turn boundaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.arrays import own_array
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

    def arrays(self) -> list[mx.array]:
        own = [] if self.logits is None else [self.logits]
        return own + [
            array for layer in self.layers.values() for array in layer.arrays()
        ]


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
        return len(self.keys) * (
            self.keys.shape[1] * self.keys.itemsize + INDEX_BYTES
        ) + footprint(self.arrays())

    def arrays(self) -> list[mx.array]:
        layers = [array for layer in self.whole.values() for array in layer.arrays()]
        return layers + [
            array for snapshot in self.snapshots.values() for array in snapshot.arrays()
        ]

    def resumable(self, limit: int) -> int:
        """Return the largest length up to ``limit`` from which a row can continue, or 0."""
        ends = [min(limit, self.length)]
        if len(self.whole) < self.num_layers:
            cut = (
                (min(limit, at), snapshot) for at, snapshot in self.snapshots.items()
            )
            ends = [end for end, snapshot in cut if self._serves(snapshot, end)]
        longest = max(ends, default=0)
        least = max((layer.floor for layer in self.whole.values()), default=0)
        return longest if longest >= least else 0

    def logits_at(self, length: int) -> mx.array | None:
        snapshot = self.snapshots.get(length)
        return None if snapshot is None else snapshot.logits

    def restore(self, length: int, num_pictures: int) -> list[Any]:
        """Make single-row caches of the first ``length`` positions and ``num_pictures``."""
        snapshot = Snapshot()
        if len(self.whole) < self.num_layers:
            snapshot = next(
                p
                for at, p in sorted(self.snapshots.items())
                if at >= length and self._serves(p, length)
            )
        share = num_pictures / self.num_pictures if self.num_pictures else 0.0
        layers = {**self.whole, **snapshot.layers}
        return [
            layers[index].of_pictures(share).restore(length)
            for index in range(self.num_layers)
        ]

    def _serves(self, snapshot: Snapshot, length: int) -> bool:
        complete = len(self.whole) + len(snapshot.layers) == self.num_layers
        return (
            length > 0
            and complete
            and all(layer.reaches(length) for layer in snapshot.layers.values())
        )


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


def save_snapshot(
    caches: Sequence[Any], length: int, logits: mx.array | None
) -> Snapshot:
    """Save the layers that are not whole, unevaluated."""
    return Snapshot(
        {
            index: state
            for index, cache in enumerate(caches)
            if not (state := kind_of(cache).saved(length)).is_whole
        },
        None if logits is None else own_array(logits),
    )


def save_row(
    caches: Sequence[Any],
    keys: np.ndarray,
    snapshots: Mapping[int, Snapshot],
    num_pictures: int,
    constant: Mapping[int, LayerState] | None = None,
) -> SavedRow:
    """Save a row's caches, unevaluated; ``constant``: layers saved already."""
    whole, last = dict(constant or {}), dict[int, LayerState]()
    for index, cache in enumerate(caches):
        if index not in whole:
            state = kind_of(cache).saved(len(keys))
            (whole if state.is_whole else last)[index] = state
    kept = {at: snapshot for at, snapshot in snapshots.items() if at <= len(keys)}
    if last and all(state.reaches(len(keys)) for state in last.values()):
        kept[len(keys)] = Snapshot(
            last, kept[len(keys)].logits if len(keys) in kept else None
        )
    return SavedRow(keys, len(caches), whole, kept, num_pictures)
