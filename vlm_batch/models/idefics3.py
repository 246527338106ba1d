"""Idefics 3: pictures as tiles of one size before a plain decoder."""

from __future__ import annotations

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="idefics3", model_types=("idefics3",)))
class Idefics3(Adapter):
    """Tiles of one size, and a language model without a trunk of its own."""

    tower_class = RememberingBatchTower
    input_keys = Adapter.input_keys | {"pixel_attention_mask"}

    embeddings = "embed_tokens"
    last_hidden = "norm"
