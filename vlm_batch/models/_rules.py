"""Corrections of a folder before mlx-vlm's classes read it: rules for ``config.json`` and for tensors, and their changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from vlm_batch.errors import UnsupportedModel

Config = dict[str, Any]
Weights = dict[str, mx.array]
Change = Callable[[Config], Config]


@dataclass(frozen=True)
class Rule:
    """A correction of ``config.json``. It goes by what a folder holds, not by the version that it names.

    It is for the model types ``types`` (every type, where there are none), and for a ``part`` that has all entries of
    ``where``: "text" and "vision", "" for the whole, "*" for the whole and everything in it. ``source`` says who reads the
    result, where that is not the first type's own ``config.py`` in mlx-vlm.
    """

    types: str
    change: Change
    part: str = ""
    where: str = ""
    source: str = ""

    def apply(self, config: Config, model_type: str) -> Config:
        """The configuration of this type, corrected if the rule is for it."""
        if self.types and model_type not in self.types.split():
            return config
        if self.part == "*":
            return self._everywhere(config)
        key = f"{self.part}_config"
        part = config.get(key) if self.part else config
        if not isinstance(part, Mapping) or not self._fits(part):
            return config
        changed = self.change(dict(part))
        return config | {key: changed} if self.part else changed

    def _fits(self, part: Mapping[str, Any]) -> bool:
        return all(
            isinstance(part.get(name), Mapping) if name.endswith("_config") else part.get(name) is not None
            for name in self.where.split()
        )

    def _everywhere(self, config: Mapping[str, Any]) -> Config:
        parts = {
            name: value for name, value in config.items() if name.endswith("_config") and isinstance(value, Mapping)
        }
        found = {**config, **{name: self._everywhere(part) for name, part in parts.items()}}
        return self.change(found) if self._fits(found) else found


@dataclass(frozen=True)
class Tensors:
    """Corrections of a family's tensors: as they lie (``names``, then ``change``), and as mlx-vlm has put them (``finish``)."""

    #: Patterns of names and what they become, in order.
    names: tuple[tuple[str, str], ...] = ()
    change: Callable[[Weights, Config], Weights] = lambda weights, config: weights
    #: (tensors on disk, tensors as mlx-vlm has changed them) -> the latter, corrected.
    finish: Callable[[Weights, Weights, Config], Weights] = lambda lying, put, config: put
    #: The beginning of the names of parameters that no answer reads: zeros where a folder leaves them out.
    unread: str = ""
    #: Norms whose weights count from one (a pattern): they are kept in float32, as transformers multiplies them.
    from_one: str = r"(?!)"

    def put(self, weights: Weights, config: Config) -> Weights:
        """Tensors of a file as mlx-vlm expects them."""
        found: Weights = {}
        for name, value in weights.items():
            for pattern, replacement in self.names:
                name = re.sub(pattern, replacement, name)
            found[name] = value
        return self.change(found, config)


# Changes of a configuration
# ---------------------------------------------------------------------------------------------------------------------


def in_order(*steps: Change) -> Change:
    """Several changes, one after the other."""

    def run(config: Config) -> Config:
        for step in steps:
            config = step(config)
        return config

    return run


def renamed(**names: str) -> Change:
    """Entries known under other names: old name -> the one that mlx-vlm reads, where that is not there yet."""
    return lambda config: (
        config | {new: config[old] for old, new in names.items() if old in config and config.get(new) is None}
    )


def filled(**values: Any) -> Change:
    """Entries that transformers' class has as constants and mlx-vlm's asks for."""
    return lambda config: config | {name: value for name, value in values.items() if config.get(name) is None}


def without(*names: str) -> Change:
    """Entries left out, because mlx-vlm's class takes no other than its own."""
    return lambda config: {name: value for name, value in config.items() if name not in names}


def refused(reason: str) -> Change:
    """Refuse what cannot be put. Raises UnsupportedModel, with the reason."""

    def refuse(config: Config) -> Config:
        raise UnsupportedModel(f"model type {config['model_type']!r} cannot be read: {reason}")

    return refuse


def full_attention_interval(name: str) -> Change:
    """``layer_types`` as mlx-vlm counts them: every n-th layer has full attention.

    Raises UnsupportedModel for layers that lie otherwise, which mlx-vlm has no way to be told.
    """

    def change(config: Config) -> Config:
        full = [kind == "full_attention" for kind in config["layer_types"]]
        interval = full.index(True) + 1 if any(full) else len(full) + 1
        if full != [(layer + 1) % interval == 0 for layer in range(len(full))]:
            raise UnsupportedModel(f"layer_types {config['layer_types']} have full attention at no regular distance")
        return config | {name: interval}

    return change


def text_at_the_root(config: Config) -> Config:
    """The decoder's settings beside the model's, where mlx-vlm takes them from: its class overwrites ``text_config``."""
    return {**config["text_config"], **config}


# Changes of tensors
# ---------------------------------------------------------------------------------------------------------------------


def joined_attention(weights: Weights, queries: str, before: str, after: str) -> Weights:
    """Queries, keys and values as one tensor: of each name that ``queries`` finds, ``before`` and q_proj become ``after``."""
    found = dict(weights)
    for name in [name for name in weights if re.search(queries, name)]:
        parts = [found.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        found[name.replace(f"{before}q_proj.", after)] = mx.concatenate(parts)
    return found


def raised(weights: Weights, names: str) -> Weights:
    """Weights in half precision whose names a pattern finds, made float32.

    mlx-vlm adds ones and multiplies in the file's type, which loses three digits of a norm that counts from one.
    """
    half = (mx.bfloat16, mx.float16)
    return {
        name: value.astype(mx.float32) if value.dtype in half and re.search(names, name) else value
        for name, value in weights.items()
    }


def kinds_renamed(name: str, **words: str) -> Change:
    """A list of kinds of layers by mlx-vlm's words."""
    return lambda config: config | {name: [words.get(kind, kind) for kind in config[name]]}


def every(name: str, kinds: Sequence[str]) -> list[int]:
    """The layers that are of a kind."""
    return [layer for layer, kind in enumerate(kinds) if kind == name]
