"""A digest that identifies a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import tables_on_disk
from vlm_batch.store.digest import digest

#: Values of each weight in the digest.
SAMPLES = 16
UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def fingerprint(adapter: Adapter) -> str:
    """Digest the configuration, and each weight's bit sum and samples."""
    flat: Any = tree_flatten(adapter.model.parameters())
    weights: list[tuple[str, mx.array]] = sorted(flat, key=lambda item: str(item[0]))
    samples = [
        array.reshape(-1)[:: max(1, array.size // SAMPLES)][:SAMPLES]
        for _, array in weights
    ]
    sums = [mx.sum(array.view(UNSIGNED[array.itemsize])) for _, array in weights]
    mx.eval(samples, sums)
    shapes = [[path, list(array.shape), str(array.dtype)] for path, array in weights]
    rows = [
        table._read_rows(slice(0, SAMPLES))
        for table in tables_on_disk(adapter.language)
    ]
    return digest([plain(adapter.config), shapes, samples, sums, *rows]).hex()


def plain(value: Any) -> Any:
    """Return a configuration's value as dicts, lists, numbers and texts."""
    if isinstance(value, (type(None), bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return list(map(plain, sorted(value)))
    if isinstance(value, (list, tuple)):
        return list(map(plain, value))
    if hasattr(value, "__dict__"):
        return plain(vars(value))
    return str(value)
