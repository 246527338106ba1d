"""The rules that layouts are made of: changes to a configuration, and to the names and places of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from vlm_batch.errors import UnsupportedModel

Config = dict[str, Any]
Weights = dict[str, mx.array]


@dataclass(frozen=True)
class Layout:
    """Changes to one family's ``config.json`` and tensors before mlx-vlm's classes read them."""

    config: Callable[[Config], Config] = lambda config: config
    weights: Callable[[Weights, Config], Weights] = lambda weights, config: weights
    #: (tensors on disk, tensors as mlx-vlm has changed them) -> corrections of the latter.
    finish: Callable[[Weights, Weights, Config], Weights] = lambda lying, put, config: put
    #: Norms whose weights count from one (a pattern): they are kept in float32, as transformers multiplies them.
    from_one: str = ""
    #: Whether pictures are processed by transformers' processor of this type, though the model is read as another type's.
    keeps_processor: bool = False
    #: Sets attributes of the processor, from the configuration, that mlx-vlm does not read from the files.
    processor: Callable[[Any, Config], None] = lambda processor, config: None


# Configurations
# ---------------------------------------------------------------------------------------------------------------------


def in_order(*steps: Callable[[Config], Config]) -> Callable[[Config], Config]:
    """Several rules, one after the other."""

    def run(config: Config) -> Config:
        for step in steps:
            config = step(config)
        return config

    return run


def part(name: str, change: Callable[[Config], Config]) -> Callable[[Config], Config]:
    """A rule for a part of the configuration, "text" or "vision"; nothing where there is no such part."""
    key = f"{name}_config"
    return lambda config: config | {key: change(dict(config[key]))} if isinstance(config.get(key), Mapping) else config


def renamed(**names: str) -> Callable[[Config], Config]:
    """Entries known under other names: old name -> the one that mlx-vlm reads, where that is not there yet."""
    return lambda config: (
        config | {new: config[old] for old, new in names.items() if old in config and config.get(new) is None}
    )


def filled(**values: Any) -> Callable[[Config], Config]:
    """Entries that transformers' class has as constants and mlx-vlm's asks for."""
    return lambda config: config | {name: value for name, value in values.items() if config.get(name) is None}


def without(*names: str) -> Callable[[Config], Config]:
    """Entries left out, because mlx-vlm's class takes no other than its own."""
    return lambda config: {name: value for name, value in config.items() if name not in names}


def own_vision_type(config: Config) -> Config:
    """A tower's type without transformers' suffix, which mlx-vlm's tower refuses: qwen2_vl for qwen2_vl_vision."""
    own = str(config["model_type"])

    def strip(tower: Config) -> Config:
        return tower | {"model_type": own} if tower.get("model_type") == f"{own}_vision" else tower

    return part("vision", strip)(config)


def text_at_the_root(config: Config) -> Config:
    """The decoder's settings beside the model's, where mlx-vlm takes them from: its class overwrites ``text_config``."""
    text = config.get("text_config")
    return {**text, **config} if isinstance(text, Mapping) else config


def full_attention_interval(name: str = "full_attention_interval") -> Callable[[Config], Config]:
    """``layer_types`` as mlx-vlm counts them: every n-th layer has full attention.

    Raises UnsupportedModel for layers that lie otherwise, which mlx-vlm has no way to be told.
    """

    def change(config: Config) -> Config:
        types = config.get("layer_types")
        return config | {name: _interval(types)} if isinstance(types, Sequence) and types else config

    return change


def _interval(types: Sequence[str]) -> int:
    full = [kind == "full_attention" for kind in types]
    interval = full.index(True) + 1 if any(full) else len(full) + 1
    if full != [(layer + 1) % interval == 0 for layer in range(len(full))]:
        raise UnsupportedModel(f"layer_types {list(types)} have full attention at no regular distance")
    return interval


def refused(reason: str) -> Callable[[Config], Config]:
    """A rule for what cannot be put. Raises UnsupportedModel, with the reason."""

    def refuse(config: Config) -> Config:
        raise UnsupportedModel(f"model type {config['model_type']!r} cannot be read: {reason}")

    return refuse


# Weights
# ---------------------------------------------------------------------------------------------------------------------


def names(*rules: tuple[str, str]) -> Callable[[Weights, Config], Weights]:
    """Tensors renamed by patterns, in order."""

    def rename(weights: Weights, config: Config) -> Weights:
        return {_renamed(name, rules): value for name, value in weights.items()}

    return rename


def _renamed(name: str, rules: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def after(*steps: Callable[[Weights, Config], Weights]) -> Callable[[Weights, Config], Weights]:
    """Several rules for tensors, one after the other."""

    def run(weights: Weights, config: Config) -> Weights:
        for step in steps:
            weights = step(weights, config)
        return weights

    return run


def joined_attention(weights: Weights, queries: str, before: str, after: str) -> Weights:
    """Queries, keys and values as one tensor: of each name that ``queries`` finds, ``before`` and q_proj become ``after``."""
    found = dict(weights)
    for name in [name for name in weights if re.search(queries, name)]:
        parts = [found.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        found[name.replace(f"{before}q_proj.", after)] = mx.concatenate(parts)
    return found
