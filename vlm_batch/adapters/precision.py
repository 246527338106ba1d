"""The dtype and bit width of weights."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn


def precision_of(model: nn.Module) -> str:
    """Describe the dtype of most language model weights."""
    language: Any = model.language_model
    kinds: dict[str, int] = {}
    for _, module in language.named_modules():
        bits = module.get("scales") is not None and getattr(module, "bits", None)
        weight = module.get("weight")
        if isinstance(weight, mx.array):
            dtype = module["scales"].dtype if bits else weight.dtype
            named = (
                f"{bits} bits over {str(dtype).split('.')[-1]}"
                if bits
                else str(dtype).split(".")[-1]
            )
            kinds[named] = kinds.get(named, 0) + weight.nbytes
    return max(kinds, key=lambda kind: kinds[kind]) if kinds else "unknown"


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
