"""Shortens a program's start."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


@contextmanager
def without_gc() -> Iterator[None]:
    """Turn off garbage collection during imports, a seventh of their time.

    At the end it freezes all objects, earlier garbage too: for programs only.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@contextmanager
def deferred_import(*names: str) -> Iterator[None]:
    """Defer imports of packages by modules imported within, until their use."""
    modules: list[_DeferredModule] = []
    for name in names:
        spec = None if name in sys.modules else find_spec(name)
        if spec is None:
            continue
        module = _DeferredModule(name)
        # others look here to see if it is installed
        module.__spec__ = spec
        sys.modules[name] = module
        modules.append(module)
    try:
        yield
    finally:
        for module in modules:
            module.leave()


class _DeferredModule(ModuleType):
    def leave(self) -> None:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, name: str) -> Any:
        self.leave()
        return getattr(import_module(self.__name__), name)
