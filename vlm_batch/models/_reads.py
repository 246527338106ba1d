"""Records the configuration's attributes that mlx-vlm's model reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import mlx.nn as nn

#: The path of a configuration object ("text_config"; "" for the whole) and the name of one of its attributes.
Attribute = tuple[str, str]


@dataclass(frozen=True)
class ConfigReads:
    """Attributes that a model reads, when built or later; use ``in``."""

    #: Attributes that were read while the model was built.
    while_built: frozenset[Attribute]
    #: Names in code that can read the configuration later.
    later: frozenset[str]
    #: String constants in the code of all modules.
    strings: frozenset[str]

    def __contains__(self, attribute: Attribute) -> bool:
        return attribute in self.while_built or attribute[1] in self.later


class ConfigWatch:
    def __init__(self) -> None:
        self._objects: dict[int, tuple[str, Any]] = {}  # id -> (path, object)
        self._read: set[tuple[int, str]] = set()  # (id, attribute)

    def start(self, theirs: Callable[..., Any], config: Any, *args: Any) -> Any:
        """Call mlx-vlm's last function before it builds a model, and watch its result."""
        found = theirs(config, *args)
        self._objects = {id(part): (path, part) for path, part in config_objects(found)}
        for _, part in self._objects.values():
            part.__class__ = _watched(type(part), self._read)
        return found

    def end(self) -> None:
        for _, part in self._objects.values():
            part.__class__ = type(part).__mro__[1]

    def reads(
        self, model: nn.Module, adapter: type, functions: Iterable[Callable[..., Any]]
    ) -> ConfigReads:
        """Return what building ``model`` read, and what it, its adapter and ``functions`` can read later."""
        later = set(class_code(adapter)).union(
            *(_with_inner(function.__code__) for function in functions)
        )
        everywhere: set[CodeType] = set()
        for _, module in model.named_modules():
            code = class_code(module.__class__)
            everywhere |= code
            # it keeps a configuration
            if any(id(value) in self._objects for value in vars(module).values()):
                later |= code
        while_built = {
            (self._objects[owner][0], name)
            for owner, name in self._read
            if owner in self._objects
        }
        names = {name for code in later for name in code.co_names} | _strings(later)
        return ConfigReads(
            frozenset(while_built), frozenset(names), frozenset(_strings(everywhere))
        )


def config_objects(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, object) of a configuration and its parts."""
    yield path, config
    for name, value in vars(config).items():
        if is_part(name, value):
            yield from config_objects(value, f"{path}.{name}" if path else name)


def is_part(name: str, value: Any) -> bool:
    """Whether an attribute is another configuration object."""
    return name.endswith("_config") and hasattr(value, "__dict__")


def _watched(kind: type, read: set[tuple[int, str]]) -> type:
    """Make a subclass that notes every access in ``read``."""

    def get(self: Any, name: str) -> Any:
        read.add((id(self), name))
        return kind.__getattribute__(self, name)  # type: ignore[call-arg]

    return type(
        kind.__name__, (kind,), {"__getattribute__": get, "__module__": kind.__module__}
    )


@cache
def class_code(kind: Any) -> frozenset[CodeType]:
    """Return the code of a class's functions, also inherited."""
    found: set[CodeType] = set()
    for base in kind.__mro__:
        if base.__module__ in (
            "builtins",
            "vlm_batch.adapters.base",
        ) or base.__module__.startswith("mlx."):
            continue
        for value in vars(base).values():
            function = getattr(value, "fget", value)  # a property's
            function = getattr(function, "func", function)  # a cached property's
            if isinstance(function, FunctionType) and function.__name__ not in (
                "__init__",
                "sanitize",
            ):
                found |= _with_inner(function.__code__)
    return frozenset(found)


def _with_inner(code: CodeType) -> frozenset[CodeType]:
    return frozenset({code}).union(
        *(_with_inner(inner) for inner in code.co_consts if isinstance(inner, CodeType))
    )


def _strings(codes: Iterable[CodeType]) -> set[str]:
    return {
        constant
        for code in codes
        for constant in code.co_consts
        if isinstance(constant, str)
    }
