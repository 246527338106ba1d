"""The dtype and bit width of weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def precision_of(model: nn.Module) -> str:
    """Describe the dtype of most language model weights."""
    language: Any = model.language_model
    kinds: Counter[str] = Counter()
    for module in language.modules():
        weight = module.get("weight")
        if isinstance(weight, mx.array):
            kinds[_described(module)] += weight.nbytes
    return kinds.most_common(1)[0][0] if kinds else "unknown"


def _described(layer: Any) -> str:
    bits = getattr(layer, "bits", None) if layer.get("scales") is not None else None
    if not bits:
        return str(layer["weight"].dtype).split(".")[-1]
    dtype = str(layer["scales"].dtype).split(".")[-1]
    return f"{bits} bits over {dtype}"


def quantised(model: nn.Module, bits: int, group_size: int = 32) -> bool:
    """Quantise the language model in place; return False if no layer fits the group size."""

    def fits(path: str, module: Any) -> bool:
        return (
            isinstance(module, nn.Linear) and module.weight.shape[-1] % group_size == 0
        )

    language: Any = model.language_model
    if not any(fits(path, module) for path, module in language.named_modules()):
        return False
    nn.quantize(language, group_size=group_size, bits=bits, class_predicate=fits)
    mx.eval(language.parameters())
    return True
