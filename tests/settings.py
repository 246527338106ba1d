"""Folders of the zoo's weights whose config.json has settings that are in no other test, and requests to them.

``tests/references/settings.py`` records what transformers answers; ``tests/test_settings.py`` compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.checkpoints import layout, write_checkpoint

SETTINGS = Path(__file__).parent / "references" / "settings"
NUM_TOKENS = 12
ORIGINAL_LENGTH = 24
"""Of the case with long factors: of the requests below some begin beyond it, and some pass it while they answer."""


KEYS = ("text:5:40", "image:4:1")
"""Requests by the harness' names: a text of 40 tokens, and a picture."""


@dataclass(frozen=True)
class Case:
    """A family, what its config.json says otherwise, by parts, and requests by the harness' names."""

    family: str
    change: Mapping[str, Any]
    keys: tuple[str, ...] = KEYS


def factors(first: float, count: int) -> list[float]:
    """Factors of a rotation's frequencies."""
    return [first + 0.1 * index for index in range(count)]


def longrope(pairs: int) -> dict[str, Any]:
    """Positions with short and long factors."""
    return {
        "rope_type": "longrope",
        "short_factor": factors(1.0, pairs),
        "long_factor": factors(2.0, pairs),
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    }


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    """Scaled positions beside what the family's folder says."""
    return {
        "text_config": {
            "rope_parameters": {"rope_type": kind, "factor": 4.0, **more},
            "max_position_embeddings": 64,
        }
    }


YARN = scaled("yarn", original_max_position_embeddings=16)
LLAMA3 = scaled(
    "llama3",
    original_max_position_embeddings=16,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
LINEAR = scaled("linear")
WINDOW = 9
ALL_SLIDE = {"text_config": {"sliding_window": WINDOW}}
QWEN_SLIDES = {
    "text_config": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 0,
        "layer_types": None,
    }
}

#: Settings that are served as transformers has them.
APPLIED: dict[str, Case] = {
    "longrope": Case(
        "llava_onevision",
        {
            "text_config": {
                "rope_parameters": longrope(8),
                "max_position_embeddings": 512,
            }
        },
        ("text:1:5", "text:5:40", "text:2:14", "image:3:0", "text:3:24", "image:4:1"),
    ),
    **{
        f"yarn_{name}": Case(name, YARN)
        for name in (
            *(
                "qwen3_5",
                "qwen3_5_moe",
                "minicpmv4_6",
                "glm4v",
                "mistral3",
                "idefics2",
                "qwen2_5_vl",
                "glm_ocr",
            ),
            *("llava", "internvl", "qwen3_vl"),
        )
    },
    "yarn_said": Case(
        "llava_onevision",
        scaled("yarn", original_max_position_embeddings=16, attention_factor=1.5),
    ),
    **{
        f"linear_{name}": Case(name, LINEAR)
        for name in ("lfm2_vl", "aya_vision", "paligemma", "qwen3_5")
    },
    **{
        f"llama3_{name}": Case(name, LLAMA3)
        for name in ("llava", "smolvlm", "glm4v_moe")
    },
    **{
        f"window_{name}": Case(name, ALL_SLIDE)
        for name in ("idefics2", "llava_next", "pixtral", "mistral3")
    },
    **{
        f"window_{name}": Case(name, QWEN_SLIDES)
        for name in ("qwen2_vl", "qwen2_5_vl", "internvl", "llava_onevision")
    },
    "no_full_blocks": Case(
        "qwen2_5_vl", {"vision_config": {"fullatt_block_indexes": []}}
    ),
    "projector_llava": Case("llava", {"projector_hidden_act": "relu"}),
    "projector_llava_onevision": Case(
        "llava_onevision", {"projector_hidden_act": "silu"}
    ),
    **{
        f"tower_{name}": Case(name, {"vision_config": {"hidden_act": "relu"}})
        for name in ("llava", "idefics3", "mllama")
    },
}

#: Settings that are refused -> what is said.
REFUSED = {
    "qwen2_5_vl's tower": (
        Case("qwen2_5_vl", {"vision_config": {"hidden_act": "gelu"}}),
        r'vision_config.hidden_act: "gelu"',
    ),
    "internvl's layer": (
        Case("internvl", {"vision_feature_layer": -2}),
        "vision_feature_layer: -2",
    ),
    "florence2's scale": (
        Case("florence2", {"text_config": {"scale_embedding": True}}),
        "scale_embedding: true",
    ),
    "llava's decoder": (
        Case("llava", {"text_config": {"hidden_act": "gelu"}}),
        r'text_config.hidden_act: "gelu"',
    ),
    "pixtral's tower": (
        Case("pixtral", {"vision_config": {"hidden_act": "gelu"}}),
        "it computes 'silu'",
    ),
}


def merged(config: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with a change, part by part."""
    found = dict(config)
    for name, value in change.items():
        parts = ("_config", "rope_parameters", "full_attention", "sliding_attention")
        is_part = name.endswith(parts) and isinstance(value, Mapping)
        found[name] = merged(found.get(name) or {}, value) if is_part else value
    return found


# A check over all families
# ---------------------------------------------------------------------------------------------------------------------

#: Families whose changes are not recorded -> why.
NOT_SWEPT = {
    "hunyuan_vl": "its recipe replaces two functions of transformers' model, which a changed copy of it has not",
    "molmo2": "nothing was recorded; the reason was not kept, and its configuration's way to a dictionary and back is exact",
    "qwen4_exp": "nothing was recorded; the reason was not kept, and its configuration's way to a dictionary and back is exact",
}
#: Settings whose effect transformers leaves out (record.py, ``logit_scale``), and what training reads or moves tensors.
_UNSWEPT = re.compile(
    r"_.*|logits?_scal(e|ing)|.*(drop|loss|initializer|init_std|init_range|jitter|_cache|dim|size|bias|ratio|depth).*|output_(att|hid).*"
    r"|return_dict.*|tie_.*|is_.*|.*(_moe_block|clipped|standardize|use_head|attention_k_eq_v|double_wide|sampling)"
)


def swept(
    config: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each activation, epsilon, yes or no, and base of a rotation, with other values."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            if name.endswith("_config") or name.startswith(
                ("rope_parameters", "full_", "sliding_")
            ):
                yield from swept(value, (*path, name))
        elif name.endswith(("hidden_act", "hidden_activation", "activation_function")):
            yield from (
                ((*path, name), other)
                for other in ("relu", "quick_gelu" if value != "quick_gelu" else "gelu")
            )
        elif _UNSWEPT.fullmatch(name) or (
            "rope_parameters" in path and name != "rope_theta"
        ):
            continue
        elif isinstance(value, bool):
            yield (*path, name), not value
        elif isinstance(value, float) and ("eps" in name or name == "rope_theta"):
            yield (*path, name), value * (300 if "eps" in name else 3)


def nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    """A change of one setting, by parts."""
    return {path[0]: nested(path[1:], value) if len(path) > 1 else value}


def write_case(folder: Path, case: Case) -> Path:
    """The folder of a case."""
    return write_checkpoint(
        folder,
        case.family,
        config=merged(layout(case.family)["files"]["config.json"], case.change),
    )
