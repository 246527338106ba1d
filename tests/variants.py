"""Folders of transformers' with other settings than the zoo's, and its answers to them.

``tests/references/variants.py`` records what transformers saves and answers. Weights are drawn by the names of tensors, so that
none need be kept, and a folder can be written without torch.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.zoo import PLAIN

FOLDER = Path(__file__).parent / "references" / "variants"

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
TIED: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "text_config": {"tie_word_embeddings": True},
}

#: Name -> (the family whose recipe and requests are used, what its config has otherwise).
VARIANTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama4_two_experts": ("llama4", {"text_config": {"num_experts_per_tok": 2}}),
    "glm4v_tied": ("glm4v", TIED),
    "llava_next_tied": ("llava_next", TIED),
    "idefics3_tied": ("idefics3", TIED),
    "smolvlm_tied": ("smolvlm", TIED),
    "gemma4_untied": (
        "gemma4",
        {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}},
    ),
    "gemma4_unified_untied": (
        "gemma4_unified",
        {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}},
    ),
    "granite_vision_heads": ("granite_vision", {"text_config": {"head_dim": 24}}),
    "llava_onevision_heads": ("llava_onevision", {"text_config": {"head_dim": 24}}),
    "llava_heads": ("llava", {"text_config": {"head_dim": 24}}),
    "idefics3_heads": ("idefics3", {"text_config": {"head_dim": 24}}),
    "smolvlm_heads": ("smolvlm", {"text_config": {"head_dim": 24}}),
    "paligemma_heads": ("paligemma", {"text_config": {"head_dim": 24}}),
    "llava_layers": ("llava", {"vision_feature_layer": [-2, -1]}),
    "llava_next_layers": ("llava_next", {"vision_feature_layer": [-2, -1]}),
    "llava_biases": ("llava", {"text_config": {"attention_bias": True}}),
    "llava_next_biases": ("llava_next", {"text_config": {"attention_bias": True}}),
    "idefics3_biases": ("idefics3", {"text_config": {"attention_bias": True}}),
    "smolvlm_biases": ("smolvlm", {"text_config": {"attention_bias": True}}),
    "llava_llama3": (
        "llava",
        {
            "text_config": {
                "rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 8}
            }
        },
    ),
    "llava_dynamic": (
        "llava",
        {
            "text_config": {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "rope_theta": 100.0,
                    "factor": 2.0,
                },
                "max_position_embeddings": 512,
            }
        },
    ),
    "internvl_qwen2": (
        "internvl",
        {"text_config": {"model_type": "qwen2", "use_sliding_window": False}},
    ),
}


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with changes put in, part by part; a part of rotary settings is replaced as a whole."""
    found = dict(config)
    for name, value in changes.items():
        is_part = name.endswith("_config") and isinstance(value, Mapping)
        found[name] = merged(config[name], value) if is_part else value
    return found


def drawn(
    name: str, shape: tuple[int, ...], *, less_one: bool, is_tied: bool
) -> np.ndarray:
    """A tensor of a file by its name: lively, as tests/zoo draws them."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    values = random.standard_normal(shape)
    if len(shape) == 1:
        is_norm = name.endswith("weight")
        return (0.2 * values + (is_norm and not less_one)).astype(np.float32)
    is_table = "embed_tokens" in name
    if is_table or "lm_head" in name:
        values *= 3 / np.sqrt(shape[1]) if not is_table or is_tied else 1.0
        values[PLAIN:] *= 0.1  # no marker is ever the best
    elif "position_embedding" not in name:
        values *= 1.3 / np.sqrt(
            np.prod(shape[1:]) if ".experts." not in name else shape[1]
        )
    return values.astype(np.float32)


def write_variant(folder: Path, name: str) -> Path:
    """The folder of a variant, as transformers saves it."""
    with np.load(FOLDER / f"{name}.npz") as recorded:
        facts = json.loads(str(recorded["folder"]))
    folder.mkdir(parents=True, exist_ok=True)
    for file, settings in facts["files"].items():
        (folder / file).write_text(json.dumps(settings), encoding="utf-8")
    tensors = {key: mx.array(value) for key, value in tensors_of(facts).items()}
    mx.save_safetensors(
        str(folder / "model.safetensors"), tensors, metadata={"format": "pt"}
    )
    return folder


def tensors_of(facts: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a folder, from what was recorded of it."""
    shapes: Mapping[str, list[int]] = facts["tensors"]
    is_tied = not any("lm_head" in name for name in shapes)
    return {
        name: drawn(name, tuple(shape), less_one=facts["less_one"], is_tied=is_tied)
        for name, shape in shapes.items()
    }
