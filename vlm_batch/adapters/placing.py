"""Features of media, placed among a prompt's embeddings."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from types import FunctionType
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.hooks import hook, install_hooks, is_hook
from vlm_batch.adapters.prompts import are_any

#: mlx-vlm's functions of many families that write features to the positions of a mask.
NAMES = frozenset({"masked_scatter", "_masked_scatter"})


def hook_placing(files: Iterable[str], family: str) -> None:
    """Hook the functions named ``NAMES`` to place whole rows. mlx-vlm's place number by number (gemma3/gemma3.py:67)."""
    for file in sorted(files):
        bound = vars(sys.modules[file])
        hooks = {}
        for name in NAMES & bound.keys():
            theirs = bound[name]
            if isinstance(theirs, FunctionType) and not is_hook(theirs):
                hooks[name] = hook(theirs, place)
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
    is_placeholder = np.array(mask[..., 0]).astype(bool).reshape(-1)
    return fill(embeds, is_placeholder, features.astype(embeds.dtype))


def fill(embeds: mx.array, is_placeholder: np.ndarray, features: mx.array) -> mx.array:
    """Replace embeddings (B, L, D) by features (..., D), in order, at the positions (B * L,) that are True.

    The answer has the wider type of both. Raises ValueError: The features are not as many, or not as wide.
    """
    wide = embeds.shape[-1]
    new, given = int(is_placeholder.sum()), features.size // features.shape[-1]
    if features.shape[-1] != wide:
        raise ValueError(
            f"features of {features.shape[-1]} numbers do not fit embeddings of {wide}"
        )
    if new != given:
        raise ValueError(
            f"{given} rows of features do not fit {new} placeholder tokens"
        )
    if not new:
        return embeds
    at = mx.array(np.maximum(np.cumsum(is_placeholder) - 1, 0))
    moved = features.reshape(-1, wide)[at].reshape(embeds.shape)
    return mx.where(
        mx.array(is_placeholder).reshape(*embeds.shape[:-1], 1), moved, embeds
    )


@dataclass(frozen=True)
class Merge:
    """mlx-vlm's method that puts a prompt's features to its placeholders; it waits for the device to find them.

    Attributes:
        name: The method's.
        keeps_type: Whether features take the embeddings' type; else both get the wider one.
        takes_all: Whether all ids that it is given, and the family's, are placeholders; else the first that the prompt has.
        gives_mask: Whether it returns their mask (1, L, D), too.
    """

    name: str
    keeps_type: bool = False
    takes_all: bool = False
    gives_mask: bool = False


def know_positions(model: Any, merge: Merge, marks: Collection[int]) -> None:
    """Replace a model's merge by one that knows the ids. ``marks``: the family's placeholders."""
    arguments = signature(getattr(model, merge.name)).parameters
    ids = [name for name in arguments if "token_i" in name]
    needs_ids = any(arguments[name].default is Parameter.empty for name in ids)

    def put(*given: Any, **named: Any) -> Any:
        said = dict(zip(arguments, given, strict=False)) | named
        embeds, tokens = said["inputs_embeds"], np.array(said["input_ids"])[0]
        name = "image_features" if "image_features" in said else "features"
        features = said[name]
        if merge.keeps_type:
            features = features.astype(embeds.dtype)
        asked = _asked(said, ids)
        if needs_ids and not asked:
            raise ValueError(f"the configuration names no placeholder for {merge.name}")
        is_placeholder = are_any(tokens, _marks_of(merge, tokens, asked, marks))
        found = fill(embeds, is_placeholder, features)
        if not merge.gives_mask:
            return found
        return found, mx.broadcast_to(mx.array(is_placeholder)[:, None], embeds.shape)

    setattr(model, merge.name, put)


def _asked(said: Mapping[str, Any], names: Sequence[str]) -> list[int]:
    """Return the ids that arguments of these names have."""
    found: list[int] = []
    for name in names:
        if said.get(name) is not None:
            found += map(int, np.ravel(said[name]))
    return found


def _marks_of(
    merge: Merge, tokens: np.ndarray, asked: Sequence[int], marks: Collection[int]
) -> Collection[int]:
    """Return the placeholders' ids: of those that a merge is asked for, and of the family's."""
    if merge.takes_all:
        return [*asked, *marks]
    for token in asked:
        if (tokens == token).any():
            return [token]
    return asked or marks
