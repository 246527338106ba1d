"""Attributes of configurations that mlx-vlm's and transformers' models read, from a table (``runtime/upstream.py``)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from vlm_batch.runtime.upstream import code_facts

#: The path of a configuration object ("text_config"; "" for the whole) and the name of one of its attributes.
Attribute = tuple[str, str]

#: Settings that transformers' models read outside their own folder.
READ_ELSEWHERE = frozenset({"attention_chunk_size"})


@dataclass(frozen=True)
class ConfigReads:
    """Attributes that mlx-vlm's models of one type, and their adapter, read; use ``in``.

    Attributes:
        named: Attributes that are read of one part.
        later: Names that are read of any part once the model is built.
        activations: Activations that the models' code names.
    """

    named: frozenset[Attribute]
    later: frozenset[str]
    activations: frozenset[str]

    def __contains__(self, attribute: Attribute) -> bool:
        return attribute in self.named or attribute[1] in self.later


@cache
def config_reads(model_type: str) -> ConfigReads | None:
    """Return what mlx-vlm's models of a type read; None if the table does not have it."""
    written = code_facts()["mlx_vlm"]["models"].get(model_type)
    if written is None:
        return None
    named = {(path, name) for path, names in written["named"].items() for name in names}
    return ConfigReads(
        frozenset(named),
        frozenset(written["later"]),
        frozenset(written["activations"]),
    )


def read_by_transformers(kind: type) -> frozenset[str]:
    """Return the settings that the models of a configuration's class read."""
    names = code_facts()["transformers"]["models"].get(_folder(kind), ())
    return READ_ELSEWHERE.union(names)


def all_layers_slide(kind: type) -> bool:
    """Whether all layers of a class's models slide if there is a window and no ``layer_types``."""
    return _folder(kind) in code_facts()["transformers"]["all_layers_slide"]


def _folder(kind: type) -> str:
    """Return the folder of a class in transformers/models; "" for a class of others."""
    package, _, rest = kind.__module__.partition(".models.")
    return rest.partition(".")[0] if package == "transformers" else ""


@cache
def warn_of_other_version() -> None:
    """Say once that the table is of another mlx-vlm."""
    known, installed = code_facts()["mlx_vlm"]["version"], version("mlx-vlm")
    if known == installed:
        return
    warnings.warn(
        f"vlm_batch knows which settings of config.json mlx-vlm {known} reads, and {installed} is installed: a setting that "
        f"only one of them reads may be refused, or left out of the answer. pip install mlx-vlm=={known} is what was tested",
        stacklevel=2,
    )


# Configuration objects
# ---------------------------------------------------------------------------------------------------------------------


def config_objects(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, object) of a configuration and its parts."""
    yield path, config
    for name, value in vars(config).items():
        if is_part(name, value):
            yield from config_objects(value, f"{path}.{name}" if path else name)


def is_part(name: str, value: Any) -> bool:
    """Whether an attribute is another configuration object."""
    return name.endswith("_config") and hasattr(value, "__dict__")
