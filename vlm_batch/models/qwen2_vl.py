"""Qwen2-VL: M-RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters import operations
from vlm_batch.adapters.attention import seal_masks
from vlm_batch.adapters.grids import MRoPEAdapter
from vlm_batch.adapters.modules import patching
from vlm_batch.adapters.pictures import with_part
from vlm_batch.adapters.placing import fill
from vlm_batch.adapters.towers import embed_by_product
from vlm_batch.adapters.windows import attend_pictures
from vlm_batch.records import Graphs, PositionState
from vlm_batch.registry import ModelSpec, register

_BOTH = "a prompt with pictures and videos keeps both; mlx-vlm drops the videos (qwen2_vl.py:27, qwen2_5_vl.py:27)"
_FRAMES = (
    "video frames are bounded in size one by one, as in transformers' Qwen2VLVideoProcessor; mlx-vlm gives these models "
    "Qwen3-VL's bound for the whole video"
)


@register(
    ModelSpec(
        family="qwen2_vl",
        model_types=("qwen2_vl",),
        special_tokens=(
            (
                "<|ref_start|>",
                "MinerU 2.5 answers <|box_start|>x1 y1 x2 y2<|box_end|><|ref_start|>kind<|ref_end|>; "
                "mineru-vl-utils 2.0.7 decodes with skip_special_tokens=False (transformers_client.py). "
                "Qwen2-VL's own tokenizer has no such token",
            ),
        ),
        video=True,
        notes=(_BOTH, _FRAMES),
    )
)
class Qwen2VL(MRoPEAdapter):
    patches = patching(
        ("qwen2_vl.language.Attention", seal_masks),
        ("qwen2_vl.vision.Attention", attend_pictures),
        ("qwen2_vl.vision.PatchEmbed", embed_by_product),
    )

    @property
    def graphs(self) -> Graphs:
        """Compile by default where launches cost, unless a quantised layer has a bias.

        A graph fuses that bias with the broadcast before it.
        """
        if not operations.counts_launches():
            return Graphs.IF_ASKED
        for module in self.language.modules():
            if isinstance(module, nn.QuantizedLinear) and "bias" in module:
                return Graphs.IF_ASKED
        return Graphs.BY_DEFAULT

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return embeddings (1, L, D) with pictures' features.

        mlx-vlm waits for the device (qwen2_vl.py:25, qwen2_5_vl.py:25).
        """
        if "pixel_values_videos" in extra:
            ids, extra = self.videos_as_pictures(ids, extra)
        embeds, found = self.token_table(ids), extra.get("cached_image_features")
        if found is None and "pixel_values" in extra:
            tower = self.model.vision_tower
            pixels = extra["pixel_values"].astype(tower.patch_embed.proj.weight.dtype)
            found = tower(pixels, extra["image_grid_thw"], output_hidden_states=False)
        if found is None:
            return {"inputs_embeds": embeds}
        return {
            "inputs_embeds": fill(
                embeds, np.isin(np.array(ids)[0], list(self.image_token_ids)), found
            )
        }

    def positions(
        self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]
    ) -> PositionState:
        return self.grid_positions(
            ids, extra, [1.0] * len(extra.get("video_grid_thw", ()))
        )

    @classmethod
    def processor(cls, processor: Any) -> Any:
        from vlm_batch.models._qwen2_vl import each_frame_bounded

        return with_part(
            super().processor(processor), "video_processor", each_frame_bounded
        )
