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
        grids = [
            extra[name]
            for name in ("image_grid_thw", "video_grid_thw")
            if name in extra
        ]
        return sum(
            t * h * w // self.merged
            for grid in grids
            for t, h, w in np.array(grid).tolist()
        )

    @cached_property
    def merged(self) -> int:
        """Patches per token."""
        return int(self.config.vision_config.spatial_merge_size) ** 2

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        """Return one picture per grid."""
        if set(extra) != {"pixel_values", "image_grid_thw"}:
            return super().pictures(ids, extra)
        merged = self.merged
        grids = np.array(extra["image_grid_thw"])
        counts: list[int] = grids.prod(axis=1).tolist()
        places = np.flatnonzero(np.isin(np.array(ids)[0], list(self.image_token_ids)))
        pixels = split_patches(extra["pixel_values"], counts)
        if pixels is None or sum(count // merged for count in counts) != len(places):
            return super().pictures(ids, extra)  # ``encode`` refuses them
        found, place = [], 0
        for grid, picture in zip(grids, pixels, strict=True):
            positions = places[place : place + int(grid.prod()) // merged]
            found.append(
                Picture(
                    int(positions[0]),
                    int(positions[-1]) + 1,
                    {"pixels": picture, "grid": grid},
                )
            )
            place += len(positions)
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
        grids = (
            np.array(extra.get(f"{kind}_grid_thw", np.zeros((0, 3))))
            .astype(int)
            .tolist()
        )
        if any(min(grid) < 1 for grid in grids):
            raise InvalidPrompt(f"{kind}_grid_thw has an entry below 1")
        places = np.flatnonzero(np.array(ids)[0] == self.marker(kind))
        needed = [t * h * w // self.merged for t, h, w in grids]
        if sum(needed) != len(places):
            noun = "videos" if kind == "video" else "pictures"
            raise InvalidPrompt(
                f"{len(grids)} {noun} need {sum(needed)} placeholder tokens; the prompt has {len(places)}"
            )
        return [
            (int(places[count]), grid)
            for count, grid in zip(np.cumsum([0, *needed]), grids, strict=False)
        ]

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
        side = int(self.config.vision_config.spatial_merge_size)
        pictures = [(*one, 1.0) for one in self.placed(ids, extra, "image")]
        has_videos = "video_grid_thw" in extra
        timed = self.placed(ids, extra, "video") if has_videos else []
        if len(timed) != len(steps):
            raise InvalidPrompt(f"{len(timed)} videos have {len(steps)} time steps")
        videos = [(*one, step) for one, step in zip(timed, steps, strict=True)]
        blocks = [
            (first, (t, h // side, w // side), step)
            for first, (t, h, w), step in (*pictures, *videos)
        ]
        found = np.empty((3, ids.shape[1]), dtype=np.int32)
        place = following = 0
        for first, shape, step in sorted(blocks):
            found[:, place:first] = np.arange(following, following + first - place)
            following += first - place
            inside = np.indices(shape).reshape(3, -1).astype(np.float32) * np.array(
                [[step], [1], [1]], np.float32
            )
            place = first + inside.shape[1]
            found[:, first:place] = inside.astype(np.int32) + following
            following = int(found[:, first:place].max()) + 1
        length = ids.shape[1]
        found[:, place:] = np.arange(following, following + length - place)
        return PositionState(prompt=mx.array(found[:, None]), delta=following - place)

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
