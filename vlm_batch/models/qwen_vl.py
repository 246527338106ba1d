"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from vlm_batch.models.base import MRoPEAdapter, cut
from vlm_batch.registry import ModelSpec, register
from vlm_batch.types import Encoded


@register(ModelSpec(family="qwen2_vl", model_types=("qwen2_vl",)))
class Qwen2VL(MRoPEAdapter):
    """M-RoPE and nothing else."""

    compiles = True


@register(
    ModelSpec(
        family="qwen2_5_vl",
        model_types=("qwen2_5_vl",),
        notes=("vision windows of length zero are dropped: mlx-vlm compares array scalars by identity and keeps them",),
    )
)
class Qwen25VL(MRoPEAdapter):
    """M-RoPE; windowed attention in the vision tower."""

    compiles = True

    @classmethod
    def mends(cls) -> Mapping[type, type]:
        from mlx_vlm.models.qwen2_5_vl.vision import VisionModel

        class DistinctWindows(VisionModel):
            def get_window_index(self, grid_thw: mx.array) -> tuple[mx.array, mx.array]:
                """A padded grid has windows without patches, whose boundaries repeat (upstream: vision.py, __call__)."""
                index, boundaries = super().get_window_index(grid_thw)
                return index, mx.array(sorted(set(boundaries.tolist())), dtype=mx.int32)

        return {VisionModel: DistinctWindows}


@register(ModelSpec(family="qwen3_vl", model_types=("qwen3_vl",)))
class Qwen3VL(MRoPEAdapter):
    """M-RoPE and deepstack: features of several vision layers are added to the picture positions of the first text layers."""

    compiles = True
    prefill_axes = {"visual_pos_masks": 1, "deepstack_visual_embeds": None}

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        """A chunk takes the deepstack rows of its own picture positions (mlx-vlm's batch takes the whole prompt's)."""
        if "deepstack_visual_embeds" not in encoded.prefill:  # text, or picture features that came without them
            return {}
        mask = encoded.prefill["visual_pos_masks"]  # (1, L)
        before, inside = int(mask[:, :start].sum().item()), int(mask[:, start:end].sum().item())
        if not inside:
            return {}
        features = [layer[before : before + inside] for layer in encoded.prefill["deepstack_visual_embeds"]]
        return {"visual_pos_masks": cut(mask, 1, start, end), "deepstack_visual_embeds": features}
