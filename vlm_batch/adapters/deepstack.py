"""Qwen3-VL's tower with positions made on the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.windows import patch_positions

#: Most patches of a layout that is kept, at 48 bytes each.
MOST_KEPT = 16_384


@dataclass(frozen=True)
class PatchLayout:
    """Where patches (N) lie. The arrays are made of NumPy's, so any thread may use them."""

    longest: int  # rows or columns of the largest picture
    positions: mx.array  # (N, 2) rows and columns
    corners: mx.array  # (4, N) the learned positions around each patch
    shares: mx.array  # (4, N) of each of these, float32
    # (P + 1,) of the pictures' patches, a video's time steps apart
    boundaries: mx.array


def layout_of(
    grids: tuple[tuple[int, int, int], ...], side: int, merge: int
) -> PatchLayout:
    """Return the layout of grids (frames, rows, columns), cached if small.

    Args:
        side: learned positions per side.
        merge: patches per side of a merged position.
    """
    is_small = sum(frames * high * wide for frames, high, wide in grids) <= MOST_KEPT
    return (_kept_layout if is_small else _new_layout)(grids, side, merge)


def _new_layout(
    grids: tuple[tuple[int, int, int], ...], side: int, merge: int
) -> PatchLayout:
    positions: list[np.ndarray] = []
    corners: list[np.ndarray] = []
    shares: list[np.ndarray] = []
    for frames, high, wide in grids:
        at = np.tile(patch_positions(high, wide, merge), (frames, 1))
        (above, below), (left, right) = (
            _between(length, side, at[:, axis])
            for axis, length in ((0, high), (1, wide))
        )
        positions.append(at)
        corners.append(
            np.stack(
                [
                    row[0] * side + column[0]
                    for row in (above, below)
                    for column in (left, right)
                ]
            )
        )
        shares.append(
            np.stack(
                [
                    row[1] * column[1]
                    for row in (above, below)
                    for column in (left, right)
                ]
            )
        )
    lengths = [high * wide for frames, high, wide in grids for _ in range(frames)]
    return PatchLayout(
        max(max(high, wide) for _, high, wide in grids),
        mx.array(np.concatenate(positions)),
        mx.array(np.concatenate(corners, axis=1).astype(np.int32)),
        mx.array(np.concatenate(shares, axis=1)),
        mx.array(np.cumsum([0, *lengths]).astype(np.int32)),
    )


_kept_layout = lru_cache(maxsize=8)(_new_layout)


def _between(
    length: int, side: int, at: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Return the two learned positions around positions ``at`` of ``length``, each with its share."""
    step = np.arange(length, dtype=np.float32) / np.float32(max(length - 1, 1))
    points = (step * np.float32(side - 1)).astype(np.float32)[at]
    before = points.astype(np.int32)
    share = (points - before).astype(np.float32)
    return (before, np.float32(1) - share), (np.minimum(before + 1, side - 1), share)


class HostPositions:
    """A tower's mixin. mlx-vlm's waits for the device about 15 times a picture (qwen3_vl/vision.py:235 to :401)."""

    patch_embed: Any
    pos_embed: Any
    rotary_pos_emb: Any
    blocks: Any
    merger: Any
    deepstack_merger_list: Any
    deepstack_visual_indexes: Any
    num_grid_per_side: int
    spatial_merge_size: int

    def __call__(
        self, hidden_states: mx.array, grid_thw: mx.array, **kwargs: Any
    ) -> tuple[mx.array, list[mx.array]]:
        """Return features (N / merge**2, D) of patches (N, values) and grids (P, 3), and those of deepstack layers."""
        grids = tuple(map(tuple, np.array(grid_thw).tolist()))
        layout = layout_of(grids, self.num_grid_per_side, self.spatial_merge_size)
        learned = self.pos_embed(layout.corners)  # (4, N, D)
        learned = learned * layout.shares[..., None].astype(learned.dtype)
        states = self.patch_embed(hidden_states) + (
            learned[0] + learned[1] + learned[2] + learned[3]
        )
        count = states.shape[0]
        states = states.reshape(count, -1)
        angles = self.rotary_pos_emb(layout.longest)[layout.positions].reshape(
            count, -1
        )
        deepstack = []
        for number, block in enumerate(self.blocks):
            states = block(states, cu_seqlens=layout.boundaries, rotary_pos_emb=angles)
            if number in self.deepstack_visual_indexes:
                deepstack.append(
                    self.deepstack_merger_list[
                        self.deepstack_visual_indexes.index(number)
                    ](states)
                )
        return self.merger(states), deepstack
