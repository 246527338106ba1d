"""Which published configurations were tried: each was built at its full size, without weights, and has an adapter.

``LOADED`` are config.json files as published. ``BY_CLASS`` are families whose configuration is transformers' own class without
arguments: its documentation says that this is like the published model's. ``tests/models_page.py`` shows both.
"""

from __future__ import annotations

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
        "falcon_h1",
        "gemma3n",
        "gemma4",
        "gemma4_unified",
        "glm4v",
        "glm4v_moe",
        "glm5_next",
        "glm_ocr",
        "inkling",
        "internvl",
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
        "paddleocr_vl",
        "paligemma",
        "qwen2_5_vl",
        "qwen3_next",
        "qwen3_omni_moe",
        "qwen3_vl_moe",
        "smolvlm",
        "step3p7",
    }
)
