"""Our functions in the place of mlx-vlm's, only while an adapter runs its model.

mlx-vlm's modules call functions of their files by name. What runs that code unmodified on rows apart, and by cheaper kernels,
is another function under that name; but a file's names are the whole process's, and mlx-vlm's own models use them, too. So a
name is bound to a function that goes by a mark of the thread: it is there during an adapter's calls that run its model, and
without it mlx-vlm's own function is called as if nothing had happened.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import mlx.nn as nn

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class _Thread(threading.local):
    runs_adapter = False


_thread = _Thread()


def runs_model(call: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """A call of an adapter in which hooks take our functions."""

    @wraps(call)
    def marked(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
        before, _thread.runs_adapter = _thread.runs_adapter, True
        try:
            return call(*args, **kwargs)
        finally:
            _thread.runs_adapter = before

    return marked


@dataclass(frozen=True)
class Hook:
    """A function of mlx-vlm's, and what is called under its name: that function, or in an adapter another."""

    theirs: Callable[..., Any]
    either: Callable[..., Any]


def hook(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Hook:
    """``ours`` in the place of ``theirs``; it takes the same arguments. A call costs up to half a microsecond more."""

    @wraps(theirs)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (ours if _thread.runs_adapter else theirs)(*args, **kwargs)

    return Hook(theirs, either)


def files_of(module: nn.Module) -> set[str]:
    """The dotted names of the files that the classes of a module tree come from, those that they inherit from included."""
    return {base.__module__ for _, child in module.named_modules() for base in type(child).__mro__}


def put_hooks(files: Iterable[str], hooks: Mapping[str, Hook]) -> None:
    """Hook names in imported files, wherever they are mlx-vlm's functions."""
    for file in files:
        namespace = vars(sys.modules[file])
        for name, hooked in hooks.items():
            if namespace.get(name) is hooked.theirs:
                namespace[name] = hooked.either
