"""LocateAnything: Qwen2 text behind MoonViT, one token at a time."""

from __future__ import annotations

from vlm_batch.models.base import Adapter
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="locateanything",
        model_types=("locateanything",),
        notes=("answers are decoded a token at a time; mlx-vlm can decode boxes in blocks, too (pbd.py)",),
    )
)
class LocateAnything(Adapter):
    """RoPE takes each row's own offset."""

    input_keys = Adapter.input_keys | {"image_grid_hws", "image_token_id", "_grid_shapes"}
