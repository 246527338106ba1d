"""Checkpoints as transformers saves them, written without it: the zoo's weights in the recorded layouts.

``tests/references/layouts.py`` records with torch what ``save_pretrained`` writes for a family: the configuration, and for each
tensor where in the zoo's weights its numbers come from. Here they are put there.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from tests.zoo import family
from tests.zoo._build import weights_of

LAYOUTS = Path(__file__).parent / "references" / "layouts"
#: Of Falcon-H1, for a reference of its own: all others are 1 in the zoo, as mlx-vlm folds them into the weights.
MULTIPLIERS = {
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.6,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.9,
    "mlp_multipliers": [1.5, 0.6],
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 1.3],
}

#: Families with a reference and no layout -> why.
_ONLY_WORDS = (
    "transformers has its language model alone, whose folders are of another type"
)
_LIKE_IT = "transformers has no such type; the recipe's class is another one with the same parts"
NO_LAYOUT = {
    **dict.fromkeys(
        (
            *(
                "deepseek_vl_v2",
                "dots_ocr",
                "fastvlm",
                "llmjpvl",
                "locateanything",
                "mage_vl",
                "mimo_v2",
                "minicpmo",
            ),
            *("phi3_v", "youtu_vl"),
        ),
        _ONLY_WORDS,
    ),
    "phi4mm": "transformers saves it as phi4_multimodal, without its adapters; tests/test_published_sound.py has folders",
    **dict.fromkeys(
        ["kimi_vl", "llava_bunny", "mistral_large3", "phi4_siglip"], _LIKE_IT
    ),
    "deepseek_v4_text": "transformers' names for it are not the published ones, and mlx-vlm knows those alone: refused by name",
    "deepseekocr": "transformers saves it as another type (unlimited_ocr) without its projector's settings: refused",
    "deepseekocr_2": "transformers saves it as deepseek_ocr2, whose encoder's sizes mlx-vlm has written in: refused by name",
    "gemma3n": "its tower is left out of the reference, and so of the folder",
    "inkling": "transformers multiplies experts by their scales when it saves them: no places, but products",
    "paddleocr_vl": "mlx-vlm's projector has its width of 1,024 written in (paddleocr_vl/vision.py:334): no tiny one fits",
    "unlimited_ocr": "transformers saves it without its projector's settings: refused",
}


#: Families that came with transformers 5: nobody has folders of theirs in the older layout.
NO_OLDER = frozenset(
    {
        *(
            "cohere_compass",
            "gemma4",
            "gemma4_experts",
            "gemma4_unified",
            "glm5_next",
            "hunyuan_vl",
            "minicpmv4_6",
        ),
        *(
            "minicpmv4_7",
            "mistral3_ministral3",
            "mistral3_mistral4",
            "muse_glimmer",
            "muse_spark",
            "qwen3_5",
        ),
        *("qwen3_5_moe", "qwen3_vl_moe", "qwen4_exp", "step3p7"),
    }
)


def older(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as transformers 4 wrote it: rotary settings by their older names, and the width of a head."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found[name] = older(value) if name.endswith("_config") and value else value
    if "transformers_version" in found:
        found["transformers_version"] = "4.57.1"
    rope = found.pop("rope_parameters", None) or {}
    if "rope_type" not in rope and rope:  # one for each kind of layers
        found["rope_local_base_freq"], rope = (
            rope["sliding_attention"]["rope_theta"],
            rope["full_attention"],
        )
    flat = {
        name: rope[name]
        for name in ("rope_theta", "partial_rotary_factor")
        if name in rope
    }
    if "mrope_section" in rope or rope.get("rope_type", "axial") not in (
        "axial",
        "default",
    ):
        kind = "mrope" if rope["rope_type"] == "default" else rope["rope_type"]
        flat["rope_scaling"] = {**rope, "type": kind, "rope_type": rope["rope_type"]}
    if rope.get("rope_type", "axial") != "axial" and found.get("head_dim") is None:
        flat["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    return {**found, **flat}


@cache
def layout(name: str) -> Mapping[str, Any]:
    """What was recorded of a family: "files" by name, and "tensors"."""
    found: Mapping[str, Any] = json.loads(
        gzip.decompress((LAYOUTS / f"{name}.json.gz").read_bytes())
    )
    return found


def names() -> list[str]:
    """The families that have a layout."""
    return sorted(
        path.name.removesuffix(".json.gz") for path in LAYOUTS.glob("*.json.gz")
    )


def tensors_of(name: str) -> dict[str, np.ndarray]:
    """The zoo's weights of a family as they lie in a file of transformers'."""
    flat = flat_weights(family(name).build())
    return {
        key: tensor_of(facts, flat) for key, facts in layout(name)["tensors"].items()
    }


def flat_weights(zoo: nn.Module) -> np.ndarray:
    """All numbers of a model's weights from end to end."""
    return np.concatenate(
        [value.ravel() for _, value in sorted(weights_of(zoo).items())]
    )


def tensor_of(facts: Mapping[str, Any], flat: np.ndarray) -> np.ndarray:
    """A tensor of a file, from what was recorded of it and all numbers of the weights."""
    shape, dtype = facts["shape"], np.dtype(facts["dtype"])
    if "values" in facts:
        values = np.array(facts["values"], dtype=dtype)
        return np.full(shape, values) if values.ndim == 0 else values.reshape(shape)
    tensor = np.empty(shape, dtype=dtype)
    for corner, size, (place, *strides) in facts["pieces"]:
        steps = [stride * flat.itemsize for stride in strides]
        part = np.lib.stride_tricks.as_strided(flat[place:], size, steps)
        tensor[
            tuple(
                slice(begin, begin + count)
                for begin, count in zip(corner, size, strict=True)
            )
        ] = part
    return tensor - np.float32(1) if facts["less_one"] else tensor


def write_checkpoint(
    folder: Path,
    name: str,
    *,
    dtype: mx.Dtype = mx.float32,
    rounded: mx.Dtype | None = None,
    config: Mapping[str, Any] | None = None,
    is_older: bool = False,
) -> Path:
    """A family's folder, ``is_older`` as transformers 4 laid it out. ``rounded`` rounds weights to a type without keeping them
    in it; ``config`` changes config.json."""

    def as_asked(value: np.ndarray) -> mx.array:
        array = mx.array(value)
        if array.dtype != mx.float32:
            return array
        return (array if rounded is None else array.astype(rounded)).astype(dtype)

    folder.mkdir(parents=True, exist_ok=True)
    for file, settings in layout(name)["files"].items():
        changed = settings
        if file == "config.json":
            changed = {**(older(settings) if is_older else settings), **(config or {})}
        (folder / file).write_text(json.dumps(changed), encoding="utf-8")
    tensors = {key: as_asked(value) for key, value in tensors_of(name).items()}
    mx.save_safetensors(
        str(folder / "model.safetensors"), tensors, metadata={"format": "pt"}
    )
    return folder
