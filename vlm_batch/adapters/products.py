"""The products of a model with its weights, one of each shape, by which a device's arithmetic is tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

Product = tuple[int, Callable[[mx.array], mx.array]]


def products_of(model: nn.Module) -> list[Product]:
    """One product of each shape and type that the model's linear layers and tied heads have: (width, (R, width) -> (R, N))."""
    found: dict[tuple[Any, ...], Product] = {}
    for _, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.QuantizedLinear)):
            call: Callable[[mx.array], mx.array] = module
        elif isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)):
            call = module.as_linear
        else:
            continue
        weight, bits = module.weight, int(module.get("bits", 0) or getattr(module, "bits", 0) or 0)
        dtype = module.scales.dtype if bits else weight.dtype
        width = weight.shape[1] * 32 // bits if bits else weight.shape[1]
        found.setdefault((weight.shape, str(weight.dtype), str(dtype), bits), (width, _of_type(call, dtype)))
    return list(found.values())


def _of_type(call: Callable[[mx.array], mx.array], dtype: mx.Dtype) -> Callable[[mx.array], mx.array]:
    return lambda rows: call(rows.astype(dtype))


def shapes_of(model: nn.Module) -> list[list[Any]]:
    """Every weight's path, shape and type."""
    flat: Any = tree_flatten(model.parameters())
    return sorted([str(path), list(array.shape), str(array.dtype)] for path, array in flat)


def size_of(model: nn.Module) -> int:
    """Bytes of all weights."""
    flat: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in flat)
