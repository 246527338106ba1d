"""Vision features by content: a picture is encoded once."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import mlx.core as mx

from vlm_batch.arrays import arrays_of, launch, map_arrays, own_array
from vlm_batch.store.budget import ByteBudget, footprint

_log = logging.getLogger(__name__)


class FeatureStore:
    """Encoders' features by their inputs' digest."""

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self._features: dict[bytes, Any] = {}
        self.num_hits = 0

    def __len__(self) -> int:
        return len(self._features)

    @property
    def nbytes(self) -> int:
        return sum(
            footprint(arrays_of(features)) for features in self._features.values()
        )

    def get(self, key: bytes) -> Any | None:
        """Return features as new array objects, or None."""
        if key not in self._features:
            return None
        self.num_hits += 1
        self.budget.touch((id(self), key))
        return map_arrays(self._features[key], _handle)

    def put(self, key: bytes, features: Any) -> None:
        """Keep a copy of features if it fits and nothing fails."""
        if key in self._features:
            self.budget.touch((id(self), key))
            return
        nbytes = footprint(arrays_of(features))
        if nbytes > self.budget.max_bytes:
            return
        try:
            # a view would keep all pictures of its call
            own = map_arrays(features, own_array)
            launch(arrays_of(own))
            if self.budget.add(
                (id(self), key), nbytes, partial(self._features.pop, key)
            ):
                self._features[key] = own
        except Exception as error:
            self.budget.remove((id(self), key))
            _log.warning(
                "vision features could not be kept for later requests: %r", error
            )


def _handle(array: mx.array) -> mx.array:
    return array[...]  # ``x += 1`` would change the stored object
