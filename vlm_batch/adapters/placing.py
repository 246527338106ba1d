"""Features of media, placed among a prompt's embeddings."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from inspect import signature
from types import FunctionType
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.hooks import hook, install_hooks, is_hook
from vlm_batch.adapters.prompts import are_any

#: mlx-vlm's functions of many families that write features to the places of a mask.
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
    is_place = np.array(mask[..., 0]).astype(bool).reshape(-1)
    return fill(embeds, is_place, features.astype(embeds.dtype))


def fill(embeds: mx.array, is_place: np.ndarray, features: mx.array) -> mx.array:
    """Replace embeddings (B, L, D) by features (..., D), in order, at the places (B * L,) that are True.

    The answer has the wider type of both. Raises ValueError: The features are not as many, or not as wide.
    """
    wide = embeds.shape[-1]
    new, given = int(is_place.sum()), features.size // features.shape[-1]
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
    at = mx.array(np.maximum(np.cumsum(is_place) - 1, 0))
    moved = features.reshape(-1, wide)[at].reshape(embeds.shape)
    return mx.where(mx.array(is_place).reshape(*embeds.shape[:-1], 1), moved, embeds)


@dataclass(frozen=True)
class Merge:
    """mlx-vlm's method that puts a prompt's features to its placeholders; it waits for the device to find them.

    Attributes:
        name: The method's.
        keeps_type: Whether features take the embeddings' type; else both get the wider one.
        takes_all: Whether all of the ids that it is given, and the family's, mark places; else the first that the prompt has.
        gives_mask: Whether it returns the places (1, L, D), too.
    """

    name: str
    keeps_type: bool = False
    takes_all: bool = False
    gives_mask: bool = False


def know_places(model: Any, merge: Merge, marks: Collection[int]) -> None:
    """Replace a model's merge by one that knows the ids. ``marks``: the family's placeholders."""
    arguments = signature(getattr(model, merge.name)).parameters
    ids = {
        name: argument.default is argument.empty
        for name, argument in arguments.items()
        if "token_i" in name
    }

    def put(*given: Any, **named: Any) -> Any:
        said = dict(zip(arguments, given, strict=False)) | named
        embeds, tokens = said["inputs_embeds"], np.array(said["input_ids"])[0]
        features = said["image_features" if "image_features" in said else "features"]
        asked = [
            int(token)
            for name in ids
            if said.get(name) is not None
            for token in np.ravel(said[name])
        ]
        if not asked and any(ids.values()):
            raise ValueError(f"the configuration names no placeholder for {merge.name}")
        first = [token for token in asked if (tokens == token).any()][:1]
        is_place = are_any(
            tokens, [*asked, *marks] if merge.takes_all else first or asked or marks
        )
        found = fill(
            embeds,
            is_place,
            features.astype(embeds.dtype) if merge.keeps_type else features,
        )
        return (
            (found, mx.broadcast_to(mx.array(is_place)[:, None], embeds.shape))
            if merge.gives_mask
            else found
        )

    setattr(model, merge.name, put)
