"""Rules that correct a folder's configuration and tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any

import mlx.core as mx

from vlm_batch.errors import UnsupportedModel

Config = dict[str, Any]
Weights = dict[str, mx.array]
Change = Callable[[Config], Config]


@dataclass(frozen=True)
class Rule:
    """A correction of ``config.json`` files with certain entries."""

    #: Model types, separated by blanks; "" for all.
    types: str
    change: Change
    #: "text" or "vision" for that part, "" for the whole, "*" for the whole and all parts.
    part: str = ""
    #: Entries that the part must have, separated by blanks.
    needs: str = ""
    #: File that reads the result, if not the first type's ``config.py`` in mlx-vlm.
    read_by: str = ""

    def apply(self, config: Config, model_type: str) -> Config:
        """Return the configuration, corrected if the rule applies."""
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
            isinstance(part.get(name), Mapping)
            if name.endswith("_config")
            else part.get(name) is not None
            for name in self.needs.split()
        )

    def _everywhere(self, config: Mapping[str, Any]) -> Config:
        parts = {
            name: value
            for name, value in config.items()
            if name.endswith("_config") and isinstance(value, Mapping)
        }
        found = {
            **config,
            **{name: self._everywhere(part) for name, part in parts.items()},
        }
        return self.change(found) if self._fits(found) else found


@dataclass(frozen=True)
class Tensors:
    """Corrections of a family's tensors, before and after mlx-vlm's own."""

    #: (pattern, replacement) of tensors' names, in order.
    renames: tuple[tuple[str, str], ...] = ()
    #: (renamed tensors, configuration) -> tensors for mlx-vlm's ``sanitize``.
    change: Callable[[Weights, Config], Weights] = lambda weights, config: weights
    #: (tensors on disk, sanitized tensors, configuration) -> tensors for the model.
    finish: Callable[[Weights, Weights, Config], Weights] = (
        lambda on_disk, sanitized, config: sanitized
    )
    #: Prefix of parameters that no answer needs; zeros if a folder lacks them.
    unused: str = ""
    #: Pattern of norms whose weights count from one; they are kept in float32, as in transformers.
    norms_from_one: str = r"(?!)"

    def apply(self, weights: Weights, config: Config) -> Weights:
        """Return the tensors for mlx-vlm's ``sanitize``."""
        found: Weights = {}
        for name, value in weights.items():
            for pattern, replacement in self.renames:
                name = re.sub(pattern, replacement, name)
            found[name] = value
        return self.change(found, config)


# Changes of a configuration
# ---------------------------------------------------------------------------------------------------------------------


def chain(*steps: Change) -> Change:
    def run(config: Config) -> Config:
        for step in steps:
            config = step(config)
        return config

    return run


def renamed(**names: str) -> Change:
    """Copy entries to new names (old -> new), if missing."""
    return lambda config: (
        config
        | {
            new: config[old]
            for old, new in names.items()
            if old in config and config.get(new) is None
        }
    )


def filled(**values: Any) -> Change:
    """Add constants of transformers' class, if missing."""
    return lambda config: (
        config
        | {name: value for name, value in values.items() if config.get(name) is None}
    )


def without(*names: str) -> Change:
    return lambda config: {
        name: value for name, value in config.items() if name not in names
    }


def only_known(package: str, name: str) -> Change:
    """Keep the entries that mlx-vlm's class takes."""

    def change(config: Config) -> Config:
        kind = vars(import_module(f"mlx_vlm.models.{package}"))[name]
        return {
            name: value
            for name, value in config.items()
            if name in signature(kind).parameters
        }

    return change


def refused(reason: str) -> Change:
    def refuse(config: Config) -> Config:
        raise UnsupportedModel(
            f"model type {config['model_type']!r} cannot be read: {reason}"
        )

    return refuse


def full_attention_interval(name: str) -> Change:
    """Convert ``layer_types`` to an interval of full attention. Raises UnsupportedModel if irregular."""

    def change(config: Config) -> Config:
        full = [kind == "full_attention" for kind in config["layer_types"]]
        interval = full.index(True) + 1 if any(full) else len(full) + 1
        if full != [(layer + 1) % interval == 0 for layer in range(len(full))]:
            raise UnsupportedModel(
                f"layer_types {config['layer_types']} have full attention at no regular distance"
            )
        return config | {name: interval}

    return change


def text_at_the_root(config: Config) -> Config:
    """Copy the decoder's settings to the root."""
    return {**config["text_config"], **config}


# Changes of tensors
# ---------------------------------------------------------------------------------------------------------------------


def joined_attention(
    weights: Weights, queries: str, before: str, after: str
) -> Weights:
    """Join queries, keys and values whose name ``queries`` matches; ``before`` + q_proj becomes ``after``."""
    found = dict(weights)
    for name in [name for name in weights if re.search(queries, name)]:
        parts = [
            found.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"
        ]
        found[name.replace(f"{before}q_proj.", after)] = mx.concatenate(parts)
    return found


def to_float32(weights: Weights, names: str) -> Weights:
    """Convert matching half-precision weights to float32, so that norms keep their digits."""
    half = (mx.bfloat16, mx.float16)
    return {
        name: value.astype(mx.float32)
        if value.dtype in half and re.search(names, name)
        else value
        for name, value in weights.items()
    }


def with_layer_kinds(name: str, **words: str) -> Change:
    """Rename kinds of layers in a list."""
    return lambda config: (
        config | {name: [words.get(kind, kind) for kind in config[name]]}
    )


def layers_of(name: str, kinds: Sequence[str]) -> list[int]:
    return [layer for layer, kind in enumerate(kinds) if kind == name]
