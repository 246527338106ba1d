"""Phi-4-multimodal (pictures and text): fused projections, and RoPE with short and long factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.attention import fuse_rows
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.longrope import LONG_ROPE_NOTE
from vlm_batch.adapters.modules import RememberingListTower
from vlm_batch.adapters.prompts import repeat_placeholders
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="phi4mm",
        model_types=("phi4mm",),
        notes=(
            LONG_ROPE_NOTE,
            "texts are answered with the vision adapter's weights, as mlx-vlm does: it merges them when it loads",
            "pictures are plain patches: mlx-vlm drops the published model's crops and separators (phi4mm.py, sanitize)",
            "audio is refused: mlx-vlm then exchanges the whole model's weights (phi4mm.py:set_modality)",
        ),
    )
)
class Phi4MM(Adapter):
    """One id stands for a whole picture; here it is repeated for each of its positions."""

    tower_class = RememberingListTower
    input_keys = Adapter.input_keys | {"pixel_attention_mask", "spatial_shapes"}

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.phi4mm.language import Attention

        # Upstream calls ``mx.fast`` itself (phi4mm/language.py:62).
        return {Attention: fuse_rows(Attention, "qkv_proj", "o_proj")}

    def expand_ids(self, ids: mx.array, extra: Mapping[str, Any]) -> mx.array:
        (marker,) = self.image_token_ids
        return repeat_placeholders(ids, marker, self._num_patches(extra))

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Upstream's own, which wants one id for a picture."""
        places = np.flatnonzero(np.isin(np.array(ids)[0], list(self.image_token_ids)))
        firsts = np.cumsum([0, *self._num_patches(extra)])[:-1]
        kept = np.delete(np.arange(ids.shape[1]), np.delete(places, firsts))
        return super().features(ids[:, mx.array(kept)], extra)

    def _num_patches(self, extra: Mapping[str, Any]) -> list[int]:
        return [high * wide for high, wide in np.array(extra.get("spatial_shapes", ())).astype(int).tolist()]
