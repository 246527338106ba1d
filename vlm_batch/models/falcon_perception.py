"""Falcon Perception: Falcon-OCR that feeds back points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.base import create_attention_mask

from vlm_batch.adapters.base import head_of
from vlm_batch.caches.rows import RowsCache
from vlm_batch.errors import InvalidPrompt
from vlm_batch.models.falcon_ocr import FalconOCR
from vlm_batch.records import DecodeStep, PositionState
from vlm_batch.registry import ModelSpec, register

#: Points nearer than this on both axes are the same (falcon_perception/language.py:487).
SAME_POINT = 0.01
MAX_RETRIES = 100


@dataclass
class Pointer:
    """Points of one row, kept as another layer's cache."""

    # points of finished detections
    found: list[tuple[float, float]] = field(default_factory=list)
    point: tuple[float, float] | None = None  # of the unfinished detection
    has_size: bool = False
    # (2, bins) of the next token's point and size
    logits: tuple[mx.array, mx.array] | None = None
    offset: int = 0
    nbytes: int = 0
    state: tuple[()] = ()


@register(
    ModelSpec(
        family="falcon_perception",
        model_types=("falcon_perception",),
        no_prefix_reuse="what a row has pointed at is not kept",
        multi_image=False,
        notes=(
            "points, sizes and detections belong to the row; mlx-vlm keeps those of the last request on the model",
            "texts are causal; mlx-vlm's prefill lets a text without a picture see its own future "
            "(falcon_perception/language.py:458 makes a mask for pictures only)",
            "prompts are prefilled in chunks; a picture is one chunk's",
            "answers are text: segmentation masks are not drawn; every step waits for the tokens of the step before, "
            "which decide what is fed back",
        ),
    )
)
class FalconPerception(FalconOCR):
    """Embeds a coordinate or size token as what the model chose."""

    input_keys = FalconOCR.input_keys

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        embeds = self.language.model.embed_tokens(ids)
        if "pixel_values" not in extra:
            return {"inputs_embeds": embeds}
        if len(extra["image_grid_hw"]) > 1:
            raise InvalidPrompt(
                "falcon_perception takes one picture a request: its prompt has room for one"
            )
        found = extra.get("cached_image_features")
        # (N, D)
        found = (
            self.model._patchify_and_project(extra["pixel_values"])
            if found is None
            else found
        )
        if (given := int(self.picture_positions(ids, extra).sum())) != len(found):
            raise InvalidPrompt(
                f"the picture needs {len(found)} placeholder tokens; the prompt has {given}"
            )
        positions, places, delta = self.model._precompute_positions(
            ids, extra["image_grid_hw"]
        )
        embeds = self.model._merge_image_features(
            self.config.img_id, found, embeds, ids
        )
        return {
            "inputs_embeds": embeds,
            "pos_hw": places,
            "position_ids": positions[None],
            "rope_deltas": delta,
        }

    def positions(
        self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]
    ) -> PositionState:
        if "position_ids" not in features:
            return PositionState()
        return PositionState(
            prompt=features["position_ids"], delta=int(features["rope_deltas"])
        )

    def row_caches(self) -> list[Any]:
        return [*super().row_caches(), Pointer()]

    def run_step(self, step: DecodeStep) -> mx.array:
        """Feed back every row's own point or size; mlx-vlm reads one row (language.py:382-434)."""
        rows = step.caches[-1]
        assert isinstance(rows, RowsCache)
        embeds = self.language.model.embed_tokens(step.tokens)  # (B, 1, D)
        for place, (row, token) in enumerate(
            zip(rows.places, step.tokens[:, 0].tolist(), strict=True)
        ):
            if row is not None and (fed := self._take(row, token)) is not None:
                embeds[place] = fed.astype(embeds.dtype)
        return self.forward(
            step.tokens, embeds, step.caches, {"position_ids": step.positions[:, None]}
        )

    def forward(
        self,
        ids: mx.array,
        embeds: mx.array | None,
        cache: Sequence[Any],
        extra: Mapping[str, Any],
    ) -> mx.array:
        """Run trunk and head; keep logits of points and sizes."""
        *layers, pointers = cache
        mask = extra.get("mask")
        mask = create_attention_mask(ids, layers[0]) if mask is None else mask
        # (B, 1, D)
        hidden = self.language.model(
            ids, inputs_embeds=embeds, cache=layers, **{**extra, "mask": mask}
        )
        self.language.model._last_hidden_state = None
        rows = pointers.places if isinstance(pointers, RowsCache) else [pointers]
        points = self.model.decode_coords(hidden[:, -1])
        sizes = self.model.decode_sizes(hidden[:, -1])
        for place, row in enumerate(rows):
            if row is not None:
                # a scored prompt has several positions: its last one
                at = place - len(rows)
                row.logits = (points[at], sizes[at])
        return head_of(self.language)(hidden)[:, -1]

    def _take(self, row: Pointer, token: int) -> mx.array | None:
        """Update a row by its token; return its embedding (1, D), or None."""
        assert row.logits is not None
        (point, size), row.logits = row.logits, None
        if token == self.config.coord_token_id:
            row.point = new_point(point, row.found)
            return self.model.coord_encoder(mx.array([row.point]))
        if token == self.config.size_token_id:
            row.has_size = True
            return self.model.size_encoder(to_size(size))
        if token == self.config.seg_token_id:
            if row.point is not None and row.has_size:
                row.found.append(row.point)
            row.point, row.has_size = None, False
        return None


def new_point(
    logits: mx.array, found: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Return the likeliest new point (x, y) in 0..1 of (2, bins) logits."""
    last = logits.shape[-1] - 1
    point = (0.0, 0.0)
    for _ in range(MAX_RETRIES):
        x, y = np.array(mx.argmax(logits, axis=-1)).tolist()
        point = (x / last, y / last)
        if not any(
            abs(a - point[0]) < SAME_POINT and abs(b - point[1]) < SAME_POINT
            for a, b in found
        ):
            break
        logits = logits.at[mx.array([0, 1]), mx.array([x, y])].add(-1e9)
    return point


def to_size(logits: mx.array) -> mx.array:
    """Convert (2, bins) logits to (1, 2) height and width (falcon_perception.py, process_sizes)."""
    bins = logits.shape[-1]
    least = math.log2(1 / bins)
    return (
        2
        ** (
            mx.argmax(logits, axis=-1).astype(mx.float32) / (bins - 1) * -least + least
        )[None]
    )
