"""Seeded, lively weights for models from mlx-vlm's own classes, and the makers of ids and pixels.

Lively: weights are scaled so that logits are far from flat (a standard deviation of 2 to 4), attention is
peaked and every branch of a model contributes. A wrong position, mask or picture then moves log-probabilities
by far more than rounding does.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.models.switch_layers import SwitchLinear

from ._types import PLAIN, Inputs

Shape = tuple[int, ...]
Fill = Callable[[np.random.RandomState, Shape], np.ndarray]
Kind = TypeVar("Kind")


@cache
def spread(std: float, mean: float = 0.0) -> Fill:
    """Normal values around `mean`."""
    return lambda random, shape: mean + std * random.standard_normal(shape)


@cache
def fan_in(gain: float) -> Fill:
    """Normal values that keep the scale of the input times `gain`; all axes but the first are summed over."""
    return lambda random, shape: (
        gain / np.sqrt(np.prod(shape[1:])) * random.standard_normal(shape)
    )


@cache
def per_expert(gain: float) -> Fill:
    """As `fan_in`, for (experts, out, in): each expert sums over the last axis only."""
    return lambda random, shape: (
        gain / np.sqrt(shape[-1]) * random.standard_normal(shape)
    )


def constant(value: np.ndarray) -> Fill:
    """For computed tables that a module lists among its parameters."""
    return lambda random, shape: value


@dataclass(frozen=True)
class Rule:
    """Parameters whose dotted path matches `pattern` (searched) are filled by `fill`."""

    pattern: str
    fill: Fill


# By module type, tried after a family's own rules.
_BY_MODULE: tuple[tuple[type, str, Fill], ...] = (
    (nn.Linear, "weight", fan_in(1.3)),
    (nn.Linear, "bias", spread(0.2)),
    (SwitchLinear, "weight", per_expert(1.3)),
    (nn.Conv1d, "weight", fan_in(1.3)),
    (nn.Conv1d, "bias", spread(0.2)),
    (nn.Conv2d, "weight", fan_in(1.3)),
    (nn.Conv2d, "bias", spread(0.2)),
    (nn.Conv3d, "weight", fan_in(1.3)),
    (nn.Conv3d, "bias", spread(0.2)),
    (nn.Embedding, "weight", spread(1.0)),
    (nn.RMSNorm, "weight", spread(0.2, 1.0)),
    (nn.LayerNorm, "weight", spread(0.2, 1.0)),
    (nn.LayerNorm, "bias", spread(0.2)),
)


def enliven(
    model: nn.Module, seed: int, rules: Sequence[Rule] = (), quiet: str = ""
) -> None:
    """Fill every parameter of `model` from `seed`, and evaluate it.

    A parameter draws from its own stream, named by its path, so adding one leaves the others as they were.
    `quiet` is the path of the head (or of the embedding, where that is the head too): its rows for marker ids are
    made small, so that their logits are near zero and none of them is ever the best.
    A parameter that no rule covers is an error, because a default (a zero gate, a unit norm) is not lively.
    """
    weights = {
        path: draw(seed, path, value.shape, fill)
        for path, value, fill in _plan(model, rules)
    }
    if quiet:
        weights[quiet] = weights[quiet].copy()
        weights[quiet][PLAIN:] *= 0.1
    model.load_weights(
        [(path, mx.array(value)) for path, value in weights.items()], strict=False
    )
    model.eval()
    mx.eval(model.parameters())


def _plan(
    model: nn.Module, rules: Sequence[Rule]
) -> Iterator[tuple[str, mx.array, Fill]]:
    modules = dict(model.named_modules())
    for path, value in _parameters(model):
        yield path, value, _fill_for(modules, path, rules)


def _parameters(model: nn.Module) -> list[tuple[str, mx.array]]:
    """All but int64, which are computed tables that a module lists among its parameters (a hash's multipliers)."""
    flat = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    return [(path, value) for path, value in flat if value.dtype != mx.int64]


def _fill_for(modules: dict[str, nn.Module], path: str, rules: Sequence[Rule]) -> Fill:
    for rule in rules:
        if re.search(rule.pattern, path):
            return rule.fill
    owner, _, leaf = path.rpartition(".")
    for kind, name, fill in _BY_MODULE:
        if name == leaf and isinstance(modules[owner], kind):
            return fill
    raise LookupError(f"no rule fills {path} of {type(modules.get(owner)).__name__}")


# Tests build a family's model again and again, each its own, and fills of equal numbers are one.
@lru_cache(maxsize=2**14)
def draw(seed: int, path: str, shape: Shape, fill: Fill) -> np.ndarray:
    # RandomState and not Generator: its streams are frozen by numpy's policy, and recorded references rely on them.
    random = np.random.RandomState((zlib.crc32(path.encode()) + seed) % 2**32)
    drawn = np.asarray(fill(random, shape), dtype=np.float32)
    drawn.flags.writeable = False
    return drawn


def weights_of(model: nn.Module) -> dict[str, np.ndarray]:
    """All parameters by dotted path."""
    return {path: np.array(value) for path, value in _parameters(model)}


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(arrays.items()):
        digest.update(f"{name}{value.shape}".encode())
        # Rounded: the last bit of a drawn value may differ between builds of the C library.
        digest.update(
            np.round(np.asarray(value, dtype=np.float64) * 2**16)
            .astype(np.int64)
            .tobytes()
        )
    return digest.hexdigest()


def weights_hash(model: nn.Module) -> str:
    """A digest of all parameters, to tell a recorded reference that the weights have changed."""
    return _digest(weights_of(model))


def inputs_hash(inputs: Inputs) -> str:
    """A digest of a request's arrays."""
    return _digest(
        {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
    )


def words(seed: int, length: int) -> list[int]:
    """`length` ids of plain text."""
    return np.random.RandomState(seed).randint(1, PLAIN, size=length).tolist()


def pixels(seed: int, *shape: int) -> np.ndarray:
    """Normalised pixels: random, with a mean per channel block that differs between seeds."""
    random = np.random.RandomState(seed + 7919)
    return (random.standard_normal(shape) + 0.5 * random.standard_normal()).astype(
        np.float32
    )


def ids(*parts: Sequence[int]) -> np.ndarray:
    """(1, L) ids of the parts in order."""
    return np.array([[token for part in parts for token in part]], dtype=np.int32)


def text_request(seed: int, length: int) -> Inputs:
    """A request of plain text."""
    return {"input_ids": ids(words(seed, length))}


def asks(
    make: Callable[[int, list[Kind]], Inputs],
    kinds: Sequence[Kind],
    pair: Sequence[Kind],
) -> tuple[Callable[[int, int], Inputs], Callable[[int], Inputs]]:
    """A family's requests by seed: with one picture of the three ``kinds``, and with the ``pair`` of them.

    ``make`` makes a request of a seed and its pictures' kinds (their grids, sizes, or numbers of tiles).
    """

    def image(seed: int, size: int) -> Inputs:
        return make(seed, [kinds[size]])

    def two_images(seed: int) -> Inputs:
        return make(seed, list(pair))

    return image, two_images


@contextmanager
def activated(
    holders: Sequence[nn.Module], activation: nn.Module, name: str = "act_fn"
) -> Iterator[None]:
    """Modules with another activation for a while: the one of their configuration, where mlx-vlm has fixed another."""
    before = [holder[name] for holder in holders]
    for holder in holders:
        holder[name] = activation
    try:
        yield
    finally:
        for holder, own in zip(holders, before, strict=True):
            holder[name] = own


def text_by_size(seed: int, size: int) -> Inputs:
    """For models without pictures: a text of 7, 11 or 15 ids in a picture's place."""
    return text_request(seed, 7 + 4 * size)
