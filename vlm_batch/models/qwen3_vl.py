"""Qwen3-VL: M-RoPE and deepstack."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from vlm_batch.adapters.attention import seal_masks
from vlm_batch.adapters.deepstack import HostPositions
from vlm_batch.adapters.grids import MRoPEAdapter
from vlm_batch.adapters.modules import patching, under
from vlm_batch.adapters.prompts import cut
from vlm_batch.adapters.towers import Inner, embed_by_product, widen
from vlm_batch.adapters.windows import attend_pictures
from vlm_batch.inputs.videos import Sampling
from vlm_batch.records import Encoded, Graphs
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="qwen3_vl", model_types=("qwen3_vl",), video=True))
class Qwen3VL(MRoPEAdapter):
    """Decoder layers add tower layers' features; a video's time steps are pictures with seconds in words."""

    graphs = Graphs.IF_ASKED
    video_sampling = Sampling(frame_factor=1)
    prefill_axes = {"visual_pos_masks": 1, "deepstack_visual_embeds": None}
    patches = patching(
        ("qwen3_vl.language.Attention", seal_masks),
        ("qwen3_vl.vision.Attention", attend_pictures),
        ("qwen3_vl.vision.PatchEmbed", embed_by_product),
        ("qwen3_vl.vision.VisionModel", under(HostPositions)),
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        # 3,420 by mlx-vlm's default
        widen(self.model, Inner(("linear_fc1",), "linear_fc2"))

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        """Cut the chunk's deepstack rows; mlx-vlm's batch takes the prompt's."""
        # text, or picture features that came without them
        if "deepstack_visual_embeds" not in encoded.prefill:
            return {}
        mask = encoded.prefill["visual_pos_masks"]  # (1, L)
        before = int(mask[:, :start].sum().item())
        inside = int(mask[:, start:end].sum().item())
        if not inside:
            return {}
        features = [
            layer[before : before + inside]
            for layer in encoded.prefill["deepstack_visual_embeds"]
        ]
        return {
            "visual_pos_masks": cut(mask, 1, start, end),
            "deepstack_visual_embeds": features,
        }
