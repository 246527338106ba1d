"""What the integration takes of lmms-eval (0.7.3), declared again for machines without it, and put in its place there."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any


@dataclass
class TokenCounts:
    input_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None


@dataclass
class GenerationResult:
    text: str
    token_counts: TokenCounts | None = None


@dataclass
class Instance:
    request_type: str
    arguments: tuple[Any, ...]
    idx: int
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def args(self) -> tuple[Any, ...]:
        return self.arguments


class lmms:  # noqa: N801  (its name)
    is_simple = True

    def __init__(self) -> None:
        self.task_dict: dict[str, Any] = {}


@dataclass(frozen=True)
class ModelManifest:
    model_id: str
    simple_class_path: str | None = None
    chat_class_path: str | None = None
    aliases: tuple[str, ...] = ()


#: By the module that has them.
DECLARED: dict[str, tuple[Any, ...]] = {
    "lmms_eval.api.instance": (TokenCounts, GenerationResult, Instance),
    "lmms_eval.api.model": (lmms,),
    "lmms_eval.models.registry_v2": (ModelManifest,),
}


def is_installed() -> bool:
    """Whether lmms-eval itself is here."""
    there = sys.modules.get("lmms_eval")
    if there is not None:
        return hasattr(there, "__file__")
    return find_spec("lmms_eval") is not None


def stand_in() -> None:
    """Put the declared modules in the place of lmms-eval's, unless it is installed."""
    if is_installed():
        return
    for name, declared in DECLARED.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            sys.modules.setdefault(path, ModuleType(path))
        for one in declared:
            setattr(sys.modules[name], one.__name__, one)
