"""HunyuanOCR: positions on four axes (token, column, row, picture)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.base import Adapter, trunk_logits
from vlm_batch.adapters.modules import RememberingTower, patches_in, unshared
from vlm_batch.adapters.prompts import put_features
from vlm_batch.inputs.processors import without_special_tokens
from vlm_batch.records import DecodeStep, PositionState
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="hunyuan_vl",
        model_types=("hunyuan_vl",),
        notes=(
            "every token turns by its own row's position; mlx-vlm takes the batch's shared column "
            "(hunyuan_vl/language.py:206) and counts text positions from the second chunk on (:459)",
            "a picture attends to itself only, as in transformers; mlx-vlm's vision tower takes all pictures for one "
            "(hunyuan_vl/vision.py:49)",
            "the fourth axis numbers the pictures, as in transformers (modeling_hunyuan_vl.py:951) and vLLM; mlx-vlm's "
            "processor writes 0 for all of them",
            "vision positions end where the table does, as published and in vLLM; mlx-vlm goes on beyond the first one of a "
            "side that grows (hunyuan_vl/vision.py:163)",
        ),
    )
)
class HunyuanVL(Adapter):
    tower_class = unshared(RememberingTower, "its tower takes one picture a call")
    input_keys = Adapter.input_keys | {"image_grid_thw"}
    ignored = frozenset({"position_ids", "imgs_pos"})
    patches = patches_in("vlm_batch.models._hunyuan_vl")

    @classmethod
    def processor(cls, processor: Any) -> Any:
        return without_special_tokens(super().processor(processor))

    def count_placeholders(self, extra: Mapping[str, Any]) -> int | None:
        return sum(len(columns) + 2 for columns, _ in self._pictures(extra))

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        embeds = self.language.model.embed_tokens(ids)
        if "pixel_values" not in extra:
            return {"inputs_embeds": embeds}
        found = extra.get("cached_image_features")
        found = self._encode(extra) if found is None else found  # (1, tokens, D)
        rows = found.reshape(-1, found.shape[-1])
        filled = put_features(embeds, ids, self.image_token_ids, rows)
        return {"inputs_embeds": filled}

    def positions(
        self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]
    ) -> PositionState:
        """Return (4, 1, L), all token counts but inside pictures."""
        positions = np.tile(np.arange(ids.shape[1]), (4, 1))
        marks = np.flatnonzero(np.array(ids[0] == self.config.image_token_id))
        for number, (columns, rows) in enumerate(self._pictures(extra)):
            inside, marks = marks[1 : 1 + len(rows)], marks[2 + len(rows) :]
            positions[1:, inside] = np.stack(
                [columns, rows, np.full_like(rows, number)]
            )
        axes = len(self.config.text_config.rope_scaling["xdrope_section"])
        return PositionState(
            prompt=mx.array(positions[4 - axes :, None].astype(np.int32))
        )

    def run_step(self, step: DecodeStep) -> mx.array:
        axes = len(self.config.text_config.rope_scaling["xdrope_section"])
        positions = mx.broadcast_to(
            step.positions[None, :, None], (axes, step.positions.size, 1)
        )
        return self.forward(step.tokens, None, step.caches, {"position_ids": positions})

    def forward(
        self,
        ids: mx.array,
        embeds: mx.array | None,
        cache: Sequence[Any],
        extra: Mapping[str, Any],
    ) -> mx.array:
        """Run trunk and head with positions after the rows."""
        positions = extra["position_ids"].swapaxes(0, 1)  # (B, axes, L)
        return trunk_logits(
            self.language, ids, embeds, cache, {**extra, "position_ids": positions}
        )

    def model_image_sizes(
        self, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        patch = int(self.config.vision_config.patch_size)
        return tuple((wide * patch, high * patch) for high, wide in self._grids(extra))

    def _grids(self, extra: Mapping[str, Any]) -> list[tuple[int, int]]:
        grids = (
            np.array(extra["image_grid_thw"]).reshape(-1, 3).tolist()
            if "image_grid_thw" in extra
            else []
        )
        return [(high, wide) for _, high, wide in grids]

    def _pictures(
        self, extra: Mapping[str, Any]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return each picture's (columns, rows) of merged patches and line breaks."""
        merge = int(self.config.vision_config.spatial_merge_size)
        merged = [
            (high // merge, wide // merge + 1) for high, wide in self._grids(extra)
        ]
        return [
            (np.tile(np.arange(wide), high), np.repeat(np.arange(high), wide))
            for high, wide in merged
        ]

    def _encode(self, extra: Mapping[str, Any]) -> mx.array:
        grids = self._grids(extra)
        ends = np.cumsum([high * wide for high, wide in grids])[:-1].tolist()
        pictures = mx.split(extra["pixel_values"], ends)
        tower: nn.Module = self.model.vision_tower
        return mx.concatenate(
            [tower(p, [[1, *grid]]) for p, grid in zip(pictures, grids, strict=True)],
            axis=1,
        )
