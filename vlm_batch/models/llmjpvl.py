"""LLM-jp-VL: a Llama or Qwen text model behind SigLIP with pixel shuffle."""

from __future__ import annotations

from vlm_batch.adapters.base import Adapter
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="llmjpvl", model_types=("llmjpvl",)))
class LlmJpVL(Adapter):
    """The plain ``Adapter`` serves it."""

    input_keys = Adapter.input_keys | {"image_token_index"}
    ignored = frozenset({"image_flags", "num_patches"})
