"""Which published configurations were tried: each is built at its full size, without memory for weights, and has an adapter.

``LOADED`` are config.json files as published. ``BY_CLASS`` are families whose configuration is transformers' own class without
arguments: its documentation says that this is like the published model's. ``BY_DEFAULTS`` are families that transformers has no
class of, by mlx-vlm's class without arguments. ``tests/models_page.py`` shows all of them; ``tests/test_incomplete_folders.py``
builds them.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from transformers import CONFIG_MAPPING

from tests.cut import empty_model
from vlm_batch.models._derived import without_warnings

#: Family -> its published folder.
LOADED = {
    "deepseekocr_2": "DeepSeek-OCR-2",
    "florence2": "Florence-2-base",
    "gemma3": "medgemma-27b-it",
    "idefics3": "granite-docling-258M",
    "lfm2_vl": "LFM2.5-VL-1.6B",
    "mistral3": "Devstral-Small-2-24B-Instruct",
    "mllama": "Llama-3.2-90B-Vision-Instruct",
    "molmo": "Molmo-7B-D",
    "qwen2_vl": "olmOCR-7B",
    "qwen3_5": "Qwen3.5-9B-MLX-8bit",
    "qwen3_vl": "Cosmos-Reason2",
    "unlimited_ocr": "Unlimited-OCR",
}
#: Families that transformers' class without arguments describes, and that load by it.
BY_CLASS = frozenset(
    {
        "aya_vision",
        "cohere_compass",
        "ernie4_5_moe_vl",
        "falcon_h1",
        "gemma3n",
        "gemma4_unified",
        "glm4v",
        "glm4v_moe",
        "glm5_next",
        "glm_ocr",
        "got",
        "idefics2",
        "inkling",
        "internvl",
        "internvl_chat",
        "kimi_k25",
        "llama4",
        "llava",
        "llava_next",
        "llava_onevision",
        "minicpmv4_6",
        "minicpmv4_7",
        "minimax_m3_vl",
        "molmo2",
        "muse_glimmer",
        "muse_spark",
        "nemotron_h_nano_omni",
        "paddleocr_vl",
        "paligemma",
        "pixtral",
        "qwen2_5_vl",
        "qwen3_next",
        "qwen3_omni_moe",
        "qwen3_vl_moe",
        "smolvlm",
        "step3p7",
    }
)
#: Families that mlx-vlm's class without arguments describes, and that load by it.
BY_DEFAULTS = frozenset(
    {
        "deepseek_v4",
        "dots_ocr",
        "falcon_ocr",
        "falcon_perception",
        "granite4_vision",
        "granite_vision",
        "hunyuan_vl",
        "jina_vlm",
        "kimi_vl",
        "llmjpvl",
        "locateanything",
        "mage_vl",
        "mistral_large3",
        "moondream2",
        "moondream3",
        "nemotron_parse",
        "phi4_siglip",
        "phi4mm",
        "plamo2vl",
        "youtu_vl",
        "zaya1_vl",
    }
)
#: Families without any: why.
NEEDS = "mlx-vlm's class has no sizes of its own"
NOT_TRIED = {
    "deepseek_v41": "its adapter reads the map of its n-grams' tokens, which lies in the folder",
    "deepseek_vl_v2": NEEDS,
    "deepseekocr": NEEDS,
    "fastvlm": NEEDS,
    "gemma4": "transformers' class without arguments has no tower, and mlx-vlm builds none without",
    "kimi_k3": NEEDS,
    "llava_bunny": NEEDS,
    "mimo_v2": NEEDS,
    "minicpmo": NEEDS,
    "molmo_point": NEEDS,
    "multi_modality": NEEDS,
    "phi3_v": NEEDS,
    "qwen3_5_moe": "mlx-vlm cannot read what transformers' class saves without arguments: it has no mrope_section",
    "qwen4_exp": "mlx-vlm cannot read what transformers' class saves without arguments: it has no output_gate_type",
}
#: Types of transformers that are not called as the family.
CLASSES = {
    "aya_vision": "cohere2_vision",
    "ernie4_5_moe_vl": "ernie4_5_vl_moe",
    "got": "got_ocr2",
    "inkling": "inkling_mm_model",
    "internvl_chat": "internvl",
    "nemotron_h_nano_omni": "nemotron_h_omni",
}
#: Parts of a configuration -> their classes in mlx-vlm.
PARTS = {
    "audio_config": "AudioConfig",
    "perceiver_config": "PerceiverConfig",
    "projector_config": "ProjectorConfig",
    "text_config": "TextConfig",
    "vision_config": "VisionConfig",
}


def built_by_class(family: str) -> nn.Module:
    """Build the model of transformers' configuration without arguments."""
    with without_warnings():
        config = CONFIG_MAPPING[CLASSES.get(family, family)]().to_dict()
    return weightless(empty_model(config))


def built_by_defaults(family: str) -> nn.Module:
    """Build the model of mlx-vlm's configuration without arguments."""
    package: Any = import_module(f"mlx_vlm.models.{family}")
    given: dict[str, Any] = {}
    for name in inspect.signature(package.ModelConfig).parameters:
        if name == "model_type":
            given[name] = family
        kind = vars(package).get(PARTS.get(name, ""))
        if kind is not None:
            given[name] = kind()
    return weightless(package.Model(package.ModelConfig(**given)))


def weightless(model: nn.Module) -> nn.Module:
    """Replace the weights by one zero each, which is seen at every place of them: that takes no memory."""

    def zeros(value: mx.array) -> mx.array:
        return mx.broadcast_to(mx.zeros((), value.dtype), value.shape)

    model.update(tree_map(zeros, model.parameters()))
    return model
