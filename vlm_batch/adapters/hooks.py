"""Replace mlx-vlm's functions while an adapter runs its model.

Modules call functions by names in their files, which the process shares. A hook binds a name to a function that reads
the thread's current ``Call``; without one, mlx-vlm's function runs. The call also carries facts that mlx-vlm's
signatures cannot pass. A family whose hook misses is refused: it would be slow or wrong.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakSet

import mlx.nn as nn

from vlm_batch.errors import UnsupportedModel
from vlm_batch.records import Call


class _RunningCall(threading.local):
    call: Call | None = None  # None while no adapter runs

    def __init__(self) -> None:
        self.token = object()


_thread = _RunningCall()
_NOTHING = Call()

#: Every function installed by a hook.
_put: WeakSet[Callable[..., Any]] = WeakSet()


@contextmanager
def running(call: Call) -> Iterator[None]:
    """Set the thread's current call."""
    before, _thread.call = _thread.call, call
    try:
        yield
    finally:
        _thread.call = before


def current() -> Call:
    """Return the thread's current call, or an empty one."""
    return _thread.call or _NOTHING


def is_adapting() -> bool:
    """Whether an adapter runs on this thread."""
    return _thread.call is not None


def this_thread() -> object:
    """Return an object unique to this thread; ids are reused."""
    return _thread.token


@dataclass(frozen=True)
class Hook:
    theirs: Callable[..., Any]
    either: Callable[..., Any]


def hook(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Hook:
    """Make a stand-in that calls ``ours`` within adapters."""

    @wraps(theirs)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (theirs if _thread.call is None else ours)(*args, **kwargs)

    _put.add(either)
    return Hook(theirs, either)


def is_hook(bound: Any) -> bool:
    return isinstance(bound, FunctionType) and bound in _put


def files_of(module: nn.Module) -> set[str]:
    """Name the modules of a tree's classes and bases, except ours."""
    files: set[str] = set()
    for kind in set(map(type, module.modules())):
        for base in kind.__mro__:
            file = base.__module__
            if not file.startswith("vlm_batch."):
                files.add(file)
    return files


def install_hooks(
    files: Iterable[str],
    hooks: Mapping[str, Hook],
    *,
    family: str,
    required: Iterable[str] = (),
    is_strict: bool = True,
) -> None:
    """Hook names bound to mlx-vlm's functions in imported files.

    Args:
        required: Names that some file must have.
        is_strict: Whether a name bound to another function is an error.

    Raises:
        UnsupportedModel: A name is missing or bound to another function.
    """
    files, found = sorted(files), set()
    for file in files:
        namespace = vars(sys.modules[file])
        for name in hooks.keys() & namespace.keys():
            if _is_bound(namespace, name, hooks[name]):
                found.add(name)
            elif is_strict:
                raise UnsupportedModel(
                    f"{_misfit(family)}: {file}.{name} is not the function that is replaced there"
                )
    if missing := sorted(set(required) - found):
        raise UnsupportedModel(
            f"{_misfit(family)}: {', '.join(files)} has no {', '.join(missing)} to be replaced"
        )


def _is_bound(namespace: dict[str, Any], name: str, hook: Hook) -> bool:
    """Bind a name to a hook, unless it was; return False if it is another function's."""
    bound = namespace[name]
    if bound is hook.theirs:
        namespace[name] = hook.either
        return True
    return is_hook(bound) and bound.__wrapped__ is hook.theirs


#: mlx-vlm's classes that write to a cache without attending, such as indexers.
WITHOUT_ATTENTION = frozenset({"Compressor", "Glm5NextIndexer"})


def check_attention(
    module: nn.Module,
    hooked: Hook,
    *,
    family: str,
    exempt: frozenset[str] = WITHOUT_ATTENTION,
) -> None:
    """Raise UnsupportedModel if a class, neither exempt nor ours, writes to a cache without the hook."""
    for cls in set(map(type, module.modules())) - {nn.Module}:
        if cls.__name__ in exempt:
            continue
        functions = list(_upstream_functions(cls))
        writer = next(filter(_writes, functions), None)
        if writer is None:
            continue
        seen: set[FunctionType] = set()
        if not any(_reaches(function, hooked.either, seen) for function in functions):
            at = f"{writer.__module__}.{writer.__qualname__}"
            raise UnsupportedModel(
                f"{_misfit(family)}: {at} writes to a cache and does not call {hooked.theirs.__name__}, which is replaced there"
            )


def _writes(function: FunctionType) -> bool:
    """Whether a function writes to a cache."""
    return "update_and_fetch" in _names(function.__code__)


def _misfit(family: str) -> str:
    return f"{family}: this version of mlx-vlm is not the one that its adapter was written for"


def _upstream_functions(cls: type) -> Iterator[FunctionType]:
    """Yield the functions of a class that run: mlx-vlm's, and not those that ours replace."""
    ended: set[str] = set()
    for base in cls.__mro__:
        is_replaced = is_replacement(base)
        for name, value in vars(base).items():
            if name in ended or not isinstance(value, FunctionType):
                continue
            is_ours = is_replaced and value.__module__ == base.__module__
            if is_ours and "super" in _names(value.__code__):
                continue
            # of ours that call no base, bases do not run
            ended.add(name)
            if not is_ours:
                yield value


def is_replacement(cls: type) -> bool:
    """Whether a class is from this library or made in a function (``patches``)."""
    return cls.__module__.startswith("vlm_batch.") or "<locals>" in cls.__qualname__


def _reaches(
    function: FunctionType, wanted: Callable[..., Any], seen: set[FunctionType]
) -> bool:
    """Whether a function calls another by global names, itself or by what it calls."""
    if function in seen:
        return False
    seen.add(function)
    for name in _globals(function.__code__):
        called = function.__globals__.get(name)
        if called is wanted:
            return True
        if isinstance(called, FunctionType) and _reaches(called, wanted, seen):
            return True
    return False


def _names(code: CodeType) -> set[str]:
    return {name for part in _parts(code) for name in part.co_names}


def _globals(code: CodeType) -> set[str]:
    return {
        one.argval
        for part in _parts(code)
        for one in dis.get_instructions(part)
        if one.opname == "LOAD_GLOBAL"
    }


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _parts(part)
