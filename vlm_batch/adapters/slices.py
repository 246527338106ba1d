"""Adapters of families that cut a picture into slices, whose tokens lie between bounds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.grids import MRoPEAdapter
from vlm_batch.records import Picture, PositionState


class SlicedAdapter(MRoPEAdapter):
    """Pictures in slices, whose tokens lie between bounds; positions are the count of tokens on all three axes."""

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Upstream's features; upstream checks that every slice has its tokens."""
        return Adapter.features(self, ids, extra)

    def positions(self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]) -> PositionState:
        return PositionState(prompt=mx.broadcast_to(mx.arange(ids.shape[1], dtype=mx.int32), (3, 1, ids.shape[1])))

    def picture_places(self, ids: mx.array, extra: Mapping[str, Any]) -> np.ndarray:
        places = np.zeros(ids.shape[1], dtype=np.bool_)
        for first, end in itertools.chain(*slice_bounds(extra)):
            places[first:end] = True
        return places

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        """One picture for all slices, from the first slice's tokens to the last one's."""
        found = slice_bounds(extra)
        if not found:
            return super().pictures(ids, extra)
        bounds = np.concatenate(found)
        return (Picture(int(bounds.min()), int(bounds.max()), extra),) if len(bounds) else ()

    def model_image_sizes(self, extra: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        """Unknown: the processor gives the sizes of slices alone."""
        return ()


def slice_bounds(extra: Mapping[str, Any]) -> list[np.ndarray]:
    """[first, end) of each slice's tokens (slices, 2); none where the processor does not say."""
    return [np.array(bounds).reshape(-1, 2) for bounds in extra.get("image_bound", ())]
