"""Molmo 2: features added to placeholders; picture tokens attend both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.joint import CallKind, TowerCall
from vlm_batch.adapters.modules import RememberingTower, patching, two_tables, under
from vlm_batch.records import Encoded
from vlm_batch.registry import ModelSpec, register


class HostCrops:
    """Reads one request's pictures on the host. mlx-vlm waits for the device at each number (molmo2/molmo2.py:84)."""

    config: Any

    def build_batched_images(
        self,
        input_ids: mx.array,
        pixel_values: mx.array,
        image_token_pooling: mx.array,
        image_grids: mx.array,
        image_num_crops: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """Return crops (1, C, N, D) of a row, and the patches that are pooled (1, T, K), counted over all pictures.

        Raises:
            ValueError: Pictures, crops, or pooled patches are not as many as said, or a patch is of another picture.
        """
        pooling, grids, crops = (
            np.array(given).astype(int)
            for given in (image_token_pooling, image_grids, image_num_crops)
        )
        # of the whole picture and of its crops
        lengths = grids.reshape(-1, 2, 2).prod(axis=2).sum(axis=1)
        pictures = (
            int((np.array(input_ids) == self.config.image_end_token_id).sum()) // 2
        )
        for what, said, given in (
            ("image grids", pictures, len(grids)),
            ("image crop counts", pictures, len(crops)),
            ("crops", int(crops.sum()), pixel_values.shape[0]),
            ("pooled patches", int(lengths.sum()), len(pooling)),
        ):
            if said != given:
                raise ValueError(f"Expected {said} {what}, got {given}")
        counts = crops * pixel_values.shape[1]
        if (crops < 0).any() or (pooling >= np.repeat(counts, lengths)[:, None]).any():
            raise ValueError(
                "image_token_pooling names a patch that its picture does not have"
            )
        firsts = np.repeat(np.cumsum(counts) - counts, lengths)[:, None]
        return pixel_values[None], mx.array(
            np.where(pooling >= 0, pooling + firsts, pooling).astype(np.int32)
        )[None]


class PoolingTower(RememberingTower):
    """A tower over crops (1, C, N, D) and indices of the patches that it pools (1, T, K); a negative one is none.

    It returns a row for each token of T with a patch.
    """

    why_apart = None

    def kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallKind | None:
        if len(args) != 2 or kwargs or [array.ndim for array in args] != [4, 3]:
            return None
        crops, pooled = args
        return CallKind(
            "",
            (crops.shape[2:], pooled.shape[2:]),
            (str(crops.dtype), str(pooled.dtype)),
        )

    def run_joined(self, calls: Sequence[TowerCall]) -> list[Any]:
        return self.each_once(calls, self._as_one)

    def _as_one(self, calls: Sequence[TowerCall]) -> list[Any]:
        firsts = np.cumsum(
            [0, *(self.count_patches(call, 0) for call in calls)]
        ).tolist()
        numbers = [np.array(call.args[1]) for call in calls]
        counted = [
            np.where(each >= 0, each + first, each)
            for each, first in zip(numbers, firsts, strict=False)
        ]
        crops = mx.concatenate([call.args[0] for call in calls], axis=1)
        found = self.fresh((crops, mx.array(np.concatenate(counted, axis=1))), {})
        ends = np.cumsum([(each >= 0).any(axis=-1).sum() for each in numbers]).tolist()
        return list(mx.split(found, ends[:-1]))

    def count_patches(self, call: TowerCall, patch: int) -> int:
        return int(call.args[0].shape[1] * call.args[0].shape[2])


@register(
    ModelSpec(
        family="molmo2",
        model_types=("molmo2",),
        notes=(
            "all tokens of all pictures see each other, as in transformers (modeling_molmo2.py, create_causal_mask with "
            "one block of picture tokens); mlx-vlm makes no such mask, and its pictures are causal",
            "the vision tower's GELU is the tanh form that its config names; mlx-vlm takes the sigmoid form "
            "(molmo2/vision.py:13)",
        ),
    )
)
class Molmo2(Adapter):
    """Markers and column ends are picture tokens, too."""

    _features_have_rows = True
    embeddings = "model.wte"
    tower_class = PoolingTower
    input_keys = Adapter.input_keys | {
        "image_token_pooling",
        "image_grids",
        "image_num_crops",
    }
    patches = patching(
        ("molmo2.language.Molmo2Embedding", two_tables),
        ("molmo2.molmo2.Model", under(HostCrops)),
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        if self.config.vision_config.vit_config.hidden_act == "gelu_pytorch_tanh":
            for block in self.model.vision_tower.image_vit.transformer:
                # mlx-vlm: a sigmoid (molmo2/vision.py:13); transformers: ACT2FN["gelu_pytorch_tanh"].
                block.feed_forward.act = nn.GELU(approx="precise")

    @cached_property
    def image_token_ids(self) -> frozenset[int]:
        return frozenset({self.config.image_patch_id})

    def atomic_spans(
        self, ids: mx.array, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        """Return one span over all pictures."""
        marked = np.flatnonzero(self._is_picture(ids))
        return (
            ((int(marked[0]), int(marked[-1]) + 1),)
            if "pixel_values" in extra and len(marked)
            else ()
        )

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        """Return the pictures' mask (1, 1, L, end), bool."""
        if not any(start <= first < end for first, _ in encoded.atomic):
            return {}
        picture = mx.array(self._is_picture(encoded.input_ids)[:end])
        rows, columns = mx.arange(start, end)[:, None], mx.arange(end)[None, :]
        return {
            "mask": ((columns <= rows) | (picture[start:][:, None] & picture[None, :]))[
                None, None
            ]
        }

    def _is_picture(self, ids: mx.array) -> np.ndarray:
        config = self.config
        markers = [
            config.image_start_token_id,
            config.low_res_image_start_token_id,
            config.image_end_token_id,
        ]
        markers += [config.image_patch_id, config.image_col_id, config.image_low_res_id]
        return np.isin(
            np.array(ids)[0],
            [*markers, config.frame_start_token_id, config.frame_end_token_id],
        )
