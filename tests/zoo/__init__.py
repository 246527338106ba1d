"""Tiny, lively models of every family that is verified, requests to them, and the answer each request gets alone.

tiny = family("qwen2_vl")
model = tiny.build()
trace = tiny.greedy(model, tiny.image(seed=1, size=0), 8)
"""

from ._build import weights_hash
from ._oracle import generate_alone, to_mx
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily, Trace
from .aya_vision import FAMILY as _AYA_VISION
from .falcon_ocr import FAMILY as _FALCON_OCR
from .gemma3n import FAMILY as _GEMMA3N
from .glm4v import FAMILY as _GLM4V
from .mllama import FAMILY as _MLLAMA
from .moondream3 import FAMILY as _MOONDREAM3
from .qwen2_5_vl import FAMILY as _QWEN2_5_VL
from .qwen2_vl import FAMILY as _QWEN2_VL
from .qwen3_vl import FAMILY as _QWEN3_VL

FAMILIES: dict[str, TinyFamily] = {
    tiny.name: tiny
    for tiny in (
        _QWEN2_VL,
        _QWEN2_5_VL,
        _QWEN3_VL,
        _GLM4V,
        _GEMMA3N,
        _MLLAMA,
        _MOONDREAM3,
        _AYA_VISION,
        _FALCON_OCR,
    )
}


def family(name: str) -> TinyFamily:
    """The family called `name`; KeyError with the known names if there is none."""
    if name not in FAMILIES:
        raise KeyError(f"no tiny family {name!r}; there are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


__all__ = [
    "END_OF_TEXT",
    "FAMILIES",
    "PLAIN",
    "VOCABULARY",
    "Inputs",
    "TinyFamily",
    "Trace",
    "family",
    "generate_alone",
    "to_mx",
    "weights_hash",
]
