"""Falcon-OCR: no vision tower; pictures attend within themselves both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.base import Adapter, trunk_logits
from vlm_batch.adapters.prompts import bidirectional_mask
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import DecodeStep, Encoded, Graphs, PositionState
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="falcon_ocr",
        model_types=("falcon_ocr",),
        multi_image=False,
        notes=(
            "positions travel with the row: mlx-vlm gives a text the rope delta of the picture before it "
            "(falcon_ocr/language.py:365) and cuts position_ids and pos_hw by the cache's offset once more (:384)",
            "prompts are prefilled in chunks; a picture is one chunk's (mlx-vlm refuses chunks, falcon_ocr.py:17)",
        ),
    )
)
class FalconOCR(Adapter):
    """A picture's tokens share one position; a second rotation tells patches apart."""

    graphs = Graphs.IF_ASKED
    input_keys = Adapter.input_keys | {"image_grid_hw"}
    prefill_axes: ClassVar[Mapping[str, int | None]] = {"pos_hw": 1}
    _features_have_rows = True
    #: Made per chunk from the picture's span, without an L x L array.
    ignored = frozenset({"attention_mask_4d"})

    def count_placeholders(self, extra: Mapping[str, Any]) -> int | None:
        grids = extra.get("image_grid_hw")
        return (
            None
            if grids is None
            else sum(high * wide for high, wide in np.array(grids).tolist())
        )

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Refuse a second picture, which mlx-vlm gives no rows and columns."""
        if len(extra.get("image_grid_hw", ())) > 1:
            raise InvalidPrompt(
                "falcon_ocr takes one picture a request: its prompt has room for one"
            )
        return super().features(ids, extra)

    def features_after(
        self, ids: mx.array, extra: Mapping[str, Any], cached: int
    ) -> dict[str, Any]:
        return self.features(ids, extra)

    def positions(
        self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]
    ) -> PositionState:
        if "position_ids" not in features:
            return PositionState()
        return PositionState(
            prompt=features["position_ids"], delta=int(features["rope_deltas"].item())
        )

    def atomic_spans(
        self, ids: mx.array, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        """Return spans up to the end token, which is causal (language.py, create_falcon_ocr_mask)."""
        spans, first = [], None
        for index, token in enumerate(np.array(ids)[0].tolist()):
            if token == self.config.image_cls_token_id and first is None:
                first = index
            elif token == self.config.img_end_id and first is not None:
                spans.append((first, index))
                first = None
        return tuple(spans) if first is None else (*spans, (first, ids.shape[1]))

    @cached_property
    def image_token_ids(self) -> frozenset[int]:
        return frozenset({self.config.img_id})

    def model_image_sizes(
        self, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        if "image_grid_hw" not in extra:
            return ()
        patch = int(self.config.vision_config.spatial_patch_size)
        return tuple(
            (wide * patch, high * patch)
            for high, wide in extra["image_grid_hw"].tolist()
        )

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        return {
            **super().chunk_features(encoded, start, end),
            "mask": bidirectional_mask(encoded.atomic, start, end),
        }

    def run_step(self, step: DecodeStep) -> mx.array:
        return self.forward(
            step.tokens, None, step.caches, {"position_ids": step.positions[:, None]}
        )

    def forward(
        self,
        ids: mx.array,
        embeds: mx.array | None,
        cache: Sequence[Any],
        extra: Mapping[str, Any],
    ) -> mx.array:
        """Run trunk and head, without mlx-vlm's deltas."""
        return trunk_logits(self.language, ids, embeds, cache, extra)
