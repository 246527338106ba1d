"""LLM-jp-VL: SigLIP with pixel shuffle before Llama or Qwen."""

from __future__ import annotations

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.placing import Merge
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="llmjpvl", model_types=("llmjpvl",)))
class LlmJpVL(Adapter):
    merge = Merge("_merge_input_ids_with_image_features", keeps_type=True)
    input_keys = Adapter.input_keys | {"image_token_index"}
    ignored = frozenset({"image_flags", "num_patches"})
