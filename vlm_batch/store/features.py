"""Vision features by what was looked at: a picture is encoded once, for all requests that are alive together and later."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from vlm_batch.arrays import arrays_of
from vlm_batch.store.budget import ByteBudget


class FeatureStore:
    """What encoders made of pictures, by the digest of what they were given; within a budget of bytes."""

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self._features: dict[bytes, Any] = {}
        self.num_hits = 0

    def __len__(self) -> int:
        return len(self._features)

    def get(self, key: bytes) -> Any | None:
        """The features (an array, or lists and tuples of them), as arrays that may be changed; None if there are none."""
        if key not in self._features:
            return None
        self.num_hits += 1
        self.budget.touch((id(self), key))
        return _handles(self._features[key])

    def put(self, key: bytes, features: Any) -> None:
        """Keep evaluated features, if they fit the budget."""
        nbytes = sum(array.nbytes for array in arrays_of(features))
        if self.budget.add((id(self), key), nbytes, lambda: self._drop(key)):
            self._features[key] = _handles(features)

    def _drop(self, key: bytes) -> None:
        del self._features[key]


def _handles(tree: Any) -> Any:
    """The same values in array objects of their own: an ``x += 1`` changes the object."""
    if isinstance(tree, mx.array):
        return tree[...]
    return type(tree)(_handles(item) for item in tree) if isinstance(tree, (list, tuple)) else tree
