"""Adapters of families that cut pictures into slices."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.grids import MRoPEAdapter
from vlm_batch.adapters.media import has_pictures, has_sound
from vlm_batch.adapters.prompts import check_positions
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import Picture, PositionState


class SlicedAdapter(MRoPEAdapter):
    """Families with slices; positions count tokens on all three axes."""

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        return Adapter.features(self, ids, extra)

    def check_placeholders(self, ids: Any, extra: Mapping[str, Any]) -> None:
        """Check placeholders or the processor's positions: mlx-vlm drops features without one."""
        if self.image_token_ids:
            super().check_placeholders(ids, extra)
            return
        bounds = sum(len(request) for request in slice_bounds(extra))
        sizes = sum(np.array(size).size // 2 for size in extra.get("tgt_sizes", ()))
        if has_pictures(extra):
            if sizes != bounds:
                raise InvalidPrompt(
                    f"the pictures have {sizes} slices (tgt_sizes); the prompt has room for {bounds} (image_bound)"
                )
        elif bounds:
            raise InvalidPrompt(
                "image_bound names placeholder tokens for pictures, and there is no picture"
            )
        noun = "media" if has_sound(extra) else "pictures"
        check_positions(ids, self.feature_positions(extra), noun)

    def feature_positions(self, extra: Mapping[str, Any]) -> list[np.ndarray]:
        """Return the positions (N,) of each run of features."""
        return [
            np.arange(first, end)
            for first, end in itertools.chain(*slice_bounds(extra))
        ]

    def positions(
        self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]
    ) -> PositionState:
        return PositionState(
            prompt=mx.broadcast_to(
                mx.arange(ids.shape[1], dtype=mx.int32), (3, 1, ids.shape[1])
            )
        )

    def picture_positions(self, ids: mx.array, extra: Mapping[str, Any]) -> np.ndarray:
        mask = np.zeros(ids.shape[1], dtype=np.bool_)
        for run in self.feature_positions(extra):
            mask[run] = True
        return mask

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        """Return one picture for all slices."""
        found = slice_bounds(extra)
        if not found:
            return super().pictures(ids, extra)
        bounds = np.concatenate(found)
        return (
            (Picture(int(bounds.min()), int(bounds.max()), extra),)
            if len(bounds)
            else ()
        )

    def model_image_sizes(
        self, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        return ()


def slice_bounds(extra: Mapping[str, Any]) -> list[np.ndarray]:
    """Return each slice's [first, end), (slices, 2), if given."""
    return [np.array(bounds).reshape(-1, 2) for bounds in extra.get("image_bound", ())]
