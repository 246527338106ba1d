"""Adapters of families with grids of patches or M-RoPE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import (
    RememberingGridTower,
    RememberingTower,
    split_patches,
)
from vlm_batch.adapters.pictures import with_part, with_quick_patches
from vlm_batch.adapters.prompts import are_any
from vlm_batch.adapters.rotary import hook_rotary
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import DecodeStep, Picture, PositionState


class GridAdapter(Adapter):
    """Families with grids (pictures, 3) of patches: time, height, width."""

    input_keys = Adapter.input_keys | {"image_grid_thw"}
    tower_class: type[RememberingTower] = RememberingGridTower

    @classmethod
    def processor(cls, processor: Any) -> Any:
        return with_part(processor, "image_processor", with_quick_patches)

    def count_placeholders(self, extra: Mapping[str, Any]) -> int | None:
        names = ("image_grid_thw", "video_grid_thw")
        grids = [extra[name] for name in names if name in extra]
        return sum(sum(self.tokens_of(grid)) for grid in grids)

    @cached_property
    def merged(self) -> int:
        """Patches per token."""
        return int(self.config.vision_config.spatial_merge_size) ** 2

    def tokens_of(self, grids: Any) -> list[int]:
        """Count the tokens of each grid."""
        return [t * h * w // self.merged for t, h, w in np.array(grids).tolist()]

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        """Return one picture per grid."""
        if set(extra) != {"pixel_values", "image_grid_thw"}:
            return super().pictures(ids, extra)
        grids = np.array(extra["image_grid_thw"])
        pixels = split_patches(extra["pixel_values"], grids.prod(axis=1).tolist())
        counts = self.tokens_of(grids)
        positions = np.flatnonzero(are_any(np.array(ids)[0], self.image_token_ids))
        if pixels is None or 0 in counts or sum(counts) != len(positions):
            return super().pictures(ids, extra)  # ``encode`` refuses them
        found: list[Picture] = []
        end = 0
        for grid, picture, count in zip(grids, pixels, counts, strict=True):
            start, end = end, end + count
            first, last = int(positions[start]), int(positions[end - 1])
            inputs = {"pixels": picture, "grid": grid}
            found.append(Picture(first, last + 1, inputs))
        return tuple(found)

    def model_image_sizes(
        self, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        if "image_grid_thw" not in extra:
            return ()
        patch = int(self.config.vision_config.patch_size)
        return tuple(
            (width * patch, height * patch)
            for _, height, width in extra["image_grid_thw"].tolist()
        )


class MRoPEAdapter(GridAdapter):
    """Families with three-axis positions: time, height, width.

    A text token has one position on all axes, shifted by the row's delta (Qwen2-VL, arXiv:2409.12191, section 2.1).
    """

    input_keys = GridAdapter.input_keys | {"pixel_values_videos", "video_grid_thw"}

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._rope_index = self.language.get_rope_index
        self.language.get_rope_index = _no_positions

    def hook_functions(self) -> None:
        super().hook_functions()
        hook_rotary(self.language, family=self.spec.family)

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Encode a video as one picture per time step.

        mlx-vlm loses videos beside pictures (qwen2_vl.py:42, qwen2_5_vl.py:42).
        """
        if "pixel_values_videos" in extra:
            ids, extra = self.videos_as_pictures(ids, extra)
        return super().features(ids, extra)

    def videos_as_pictures(
        self, ids: mx.array, extra: Mapping[str, Any]
    ) -> tuple[mx.array, dict[str, Any]]:
        """Return ids (1, L) and inputs with videos as pictures."""
        parts: list[tuple[int, mx.array, list[list[int]]]] = []
        for kind, pixels in (
            ("image", "pixel_values"),
            ("video", "pixel_values_videos"),
        ):
            row = 0
            for first, (t, h, w) in self.placed(ids, extra, kind):
                parts.append(
                    (first, extra[pixels][row : row + t * h * w], [[1, h, w]] * t)
                )
                row += t * h * w
        parts.sort(key=lambda part: part[0])
        others = {
            name: extra[name]
            for name in extra.keys() - {"pixel_values_videos", "video_grid_thw"}
        }
        pictures = {
            "pixel_values": mx.concatenate([pixels for _, pixels, _ in parts]),
            "image_grid_thw": mx.array(
                [grid for *_, grids in parts for grid in grids], dtype=mx.int32
            ),
        }
        tokens = np.array(ids)
        return mx.array(
            np.where(tokens == self.marker("video"), self.marker("image"), tokens)
        ), {**others, **pictures}

    def placed(
        self, ids: mx.array, extra: Mapping[str, Any], kind: str
    ) -> list[tuple[int, list[int]]]:
        """Return (first placeholder, grid) of each medium; raise InvalidPrompt if placeholders do not fit."""
        grids = np.array(extra.get(f"{kind}_grid_thw", ()), dtype=int)
        grids = grids.reshape(-1, 3)
        counts = self.tokens_of(grids)
        if grids.size and (grids.min() < 1 or 0 in counts):
            raise InvalidPrompt(f"{kind}_grid_thw has an entry of less than a token")
        positions = np.flatnonzero(np.array(ids)[0] == self.marker(kind))
        if sum(counts) != len(positions):
            noun = "videos" if kind == "video" else "pictures"
            raise InvalidPrompt(
                f"{len(grids)} {noun} need {sum(counts)} placeholder tokens; the prompt has {len(positions)}"
            )
        found: list[tuple[int, list[int]]] = []
        start = 0
        for grid, count in zip(grids.tolist(), counts, strict=True):
            found.append((int(positions[start]), grid))
            start += count
        return found

    def marker(self, kind: str) -> int:
        found = getattr(self.config, f"{kind}_token_id", None)
        return int(
            getattr(self.config, f"{kind}_token_index") if found is None else found
        )

    def positions(
        self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]
    ) -> PositionState:
        if "video_grid_thw" not in extra and self._are_marked(ids, extra):
            return self.grid_positions(ids, extra)
        found, delta = self._rope_index(
            ids, extra.get("image_grid_thw"), extra.get("video_grid_thw")
        )
        if found.ndim == 2:
            found = mx.broadcast_to(found[None], (3, *found.shape))
        return PositionState(prompt=found.astype(mx.int32), delta=int(delta.item()))

    def _are_marked(self, ids: mx.array, extra: Mapping[str, Any]) -> bool:
        """Whether each picture follows a mark of its own: mlx-vlm counts pictures by marks, ``grid_positions`` by grids."""
        mark = getattr(self.config, "vision_start_token_id", None)
        tokens = np.array(ids)[0]
        return mark is None or all(
            first and tokens[first - 1] == mark
            for first, _ in self.placed(ids, extra, "image")
        )

    def grid_positions(
        self,
        ids: mx.array,
        extra: Mapping[str, Any],
        steps: Sequence[float] = (),
    ) -> PositionState:
        """Return M-RoPE positions, rounded down, with a time step per video.

        Text after a medium begins one past its largest position on any axis.
        """
        pictures = self.placed(ids, extra, "image")
        has_videos = "video_grid_thw" in extra
        videos = self.placed(ids, extra, "video") if has_videos else []
        if len(videos) != len(steps):
            raise InvalidPrompt(f"{len(videos)} videos have {len(steps)} time steps")
        each = zip((*pictures, *videos), (*[1.0] * len(pictures), *steps), strict=True)
        tokens = np.array(ids)[0]
        length = len(tokens)
        found = np.empty((3, length), dtype=np.int32)
        end = following = 0
        for (first, grid), step in sorted(each):
            found[:, end:first] = np.arange(following, following + first - end)
            following += first - end
            inside, span = self.inside(tokens, first, grid, step)
            end = first + inside.shape[1]
            found[:, first:end] = inside + following
            following += span
        found[:, end:] = np.arange(following, following + length - end)
        delta = int(found.max()) + 1 - length
        return PositionState(prompt=mx.array(found[:, None]), delta=delta)

    def inside(
        self, tokens: np.ndarray, first: int, grid: Sequence[int], step: float
    ) -> tuple[np.ndarray, int]:
        """Return the positions (3, N) in a medium, and how far behind its beginning the next ones lie.

        Args:
            tokens: (L,), of which the medium begins at ``first``.
            grid: frames, rows and columns of patches.
            step: positions between two frames.
        """
        side = int(self.config.vision_config.spatial_merge_size)
        frames, high, wide = grid
        found = np.indices((frames, high // side, wide // side)).reshape(3, -1)
        found[0] = found[0].astype(np.float32) * np.float32(step)
        return found, int(found.max()) + 1

    def run_step(self, step: DecodeStep) -> mx.array:
        positions = mx.broadcast_to(
            step.positions[None, :, None], (3, step.positions.size, 1)
        )
        return self.forward(step.tokens, None, step.caches, {"position_ids": positions})


def _no_positions(*args: Any, **kwargs: Any) -> tuple[mx.array, None]:
    """Stand in for ``get_rope_index`` within mlx-vlm's embeddings, where it waits for the device; nobody reads the result.

    ``MRoPEAdapter.positions`` makes a row's positions.
    """
    return mx.array([[0]]), None
