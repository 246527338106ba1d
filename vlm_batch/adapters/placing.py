"""Features of media, placed among a prompt's embeddings."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FunctionType

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.hooks import hook, install_hooks, is_hook

#: mlx-vlm's functions of many families that write features to the places of a mask.
NAMES = ("masked_scatter", "_masked_scatter")


def hook_placing(files: Iterable[str], family: str) -> None:
    """Hook the functions named ``NAMES`` to place whole rows. mlx-vlm's place number by number (gemma3/gemma3.py:67)."""
    for file in sorted(files):
        names = vars(sys.modules[file])
        theirs = {name: bound for name in NAMES if isinstance(bound := names.get(name), FunctionType)}
        hooks = {name: hook(bound, place) for name, bound in theirs.items() if not is_hook(bound)}
        install_hooks([file], hooks, family=family)


def place(embeds: mx.array, mask: mx.array, features: mx.array) -> mx.array:
    """Replace embeddings by features, in order.

    Args:
        embeds: (B, L, D).
        mask: where the features go: (B, L, D), constant along D.
        features: (..., D), as many rows as positions.

    Raises:
        ValueError: The features are not as many, or not as wide.
    """
    wide = embeds.shape[-1]
    rows = np.array(mask[..., 0]).astype(bool).reshape(-1)
    new, given = int(rows.sum()), features.size // features.shape[-1]
    if features.shape[-1] != wide:
        raise ValueError(f"features of {features.shape[-1]} numbers do not fit embeddings of {wide}")
    if new != given:
        raise ValueError(f"{given} rows of features do not fit {new} placeholder tokens")
    if not new:
        return embeds
    at = mx.array(np.maximum(np.cumsum(rows) - 1, 0))
    moved = features.reshape(-1, wide)[at].astype(embeds.dtype).reshape(embeds.shape)
    return mx.where(mx.array(rows).reshape(*embeds.shape[:-1], 1), moved, embeds)
