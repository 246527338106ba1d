"""Our functions in the place of mlx-vlm's, only while an adapter runs its model.

mlx-vlm's modules call functions of their files by name. What runs that code unmodified on rows apart, and by cheaper kernels,
is another function under that name; but a file's names are the whole process's, and mlx-vlm's own models use them, too. So a
name is bound to a function that goes by a mark of the thread, the ``Call`` that an adapter runs: without it mlx-vlm's own
function is called as if nothing had happened. The mark also carries what mlx-vlm's signatures do not let through (``current``).

mlx-vlm renames and moves its functions between versions. A hook that finds nothing to replace would leave a family on a path
that is slow, or wrong for rows apart; so both a name that is bound to something else (``put_hooks``) and attention that calls
no hooked function (``check_attention``) refuse the family, by file and function.
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


class _Thread(threading.local):
    call: Call | None = None  # None: no adapter runs

    def __init__(self) -> None:
        self.token = object()


_thread = _Thread()
_NOTHING = Call()

#: Every function that a hook has put somewhere.
_put: WeakSet[Callable[..., Any]] = WeakSet()


@contextmanager
def running(call: Call) -> Iterator[None]:
    """For as long as it lasts, an adapter runs its model on this thread: hooks take our functions."""
    before, _thread.call = _thread.call, call
    try:
        yield
    finally:
        _thread.call = before


def current() -> Call:
    """The call that an adapter runs on this thread; one that asks for nothing while none does."""
    return _thread.call or _NOTHING


def this_thread() -> object:
    """An object that is this thread's, and no later one's."""
    return _thread.token


@dataclass(frozen=True)
class Hook:
    """A function of mlx-vlm's, and what is called under its name: that function, or in an adapter another."""

    theirs: Callable[..., Any]
    either: Callable[..., Any]


def hook(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Hook:
    """A hook that calls ``ours`` in the place of ``theirs`` within adapters; both take the same arguments."""

    @wraps(theirs)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (theirs if _thread.call is None else ours)(*args, **kwargs)

    _put.add(either)
    return Hook(theirs, either)


def is_hook(bound: Any) -> bool:
    """Whether a function is a hook."""
    return isinstance(bound, FunctionType) and bound in _put


def files_of(module: nn.Module) -> set[str]:
    """The dotted names of the files that a module tree's classes, and those that they inherit from, come from; not ours."""
    files = {base.__module__ for _, child in module.named_modules() for base in type(child).__mro__}
    return {file for file in files if not file.startswith("vlm_batch.")}


def put_hooks(
    files: Iterable[str],
    hooks: Mapping[str, Hook],
    *,
    family: str,
    required: Iterable[str] = (),
    is_strict: bool = True,
) -> None:
    """Hook names in imported files, wherever they are mlx-vlm's functions; a hook from an earlier adapter counts.

    Raises UnsupportedModel, naming the family, for a ``required`` name that none of the files has, and if ``is_strict`` for
    a name that is bound to another function than the hook stands in for.
    """
    files, found = sorted(files), set()
    for file in files:
        namespace = vars(sys.modules[file])
        for name in hooks.keys() & namespace.keys():
            bound = namespace[name]
            if bound is hooks[name].theirs:
                namespace[name] = hooks[name].either
            elif not (is_hook(bound) and bound.__wrapped__ is hooks[name].theirs):
                if not is_strict:
                    continue
                raise UnsupportedModel(f"{_misfit(family)}: {file}.{name} is not the function that is replaced there")
            found.add(name)
    if missing := sorted(set(required) - found):
        raise UnsupportedModel(f"{_misfit(family)}: {', '.join(files)} has no {', '.join(missing)} to be replaced")


#: Classes of mlx-vlm's that write to a cache and do not attend, such as indexers.
WITHOUT_ATTENTION = frozenset({"Compressor", "Glm5NextIndexer"})


def check_attention(
    module: nn.Module, hooked: Hook, *, family: str, exempt: frozenset[str] = WITHOUT_ATTENTION
) -> None:
    """Refuse a model with a class of mlx-vlm's that writes to a cache and attends past the hook.

    A class passes if a function of its own, or one that it calls by name, calls the hook, or if it is
    ``exempt`` by its name. What an adapter has replaced whole is not looked at. Raises UnsupportedModel.
    """
    for cls in {type(child) for _, child in module.named_modules()} - {nn.Module}:
        functions = list(_upstream_functions(cls))
        writers = [function for function in functions if "update_and_fetch" in _names(function.__code__)]
        if not writers or cls.__name__ in exempt:
            continue
        seen: set[FunctionType] = set()
        if not any(_reaches(function, hooked.either, seen) for function in functions):
            at = f"{writers[0].__module__}.{writers[0].__qualname__}"
            raise UnsupportedModel(
                f"{_misfit(family)}: {at} writes to a cache and does not call {hooked.theirs.__name__}, which is replaced there"
            )


def _misfit(family: str) -> str:
    return f"{family}: this version of mlx-vlm is not the one that its adapter was written for"


def _upstream_functions(cls: type) -> Iterator[FunctionType]:
    """The functions of a class that are run and are not an adapter's: those of its bases, as far as ``super`` leads."""
    ended: set[str] = set()
    for base in cls.__mro__:
        is_patch = is_replacement(base)
        for name, value in vars(base).items():
            if not isinstance(value, FunctionType) or name in ended:
                continue
            if is_patch and value.__module__ == base.__module__:
                if "super" not in _names(value.__code__):
                    ended.add(name)
                continue
            ended.add(name)
            yield value


def is_replacement(cls: type) -> bool:
    """Whether a class stands in for one of mlx-vlm's: it is made in a function (``patches``), or in this library."""
    return cls.__module__.startswith("vlm_batch.") or "<locals>" in cls.__qualname__


def _reaches(function: FunctionType, wanted: Callable[..., Any], seen: set[FunctionType]) -> bool:
    """Whether a function calls another by a name of its file, itself or through functions that it calls so."""
    if function in seen:
        return False
    seen.add(function)
    called = [function.__globals__.get(name) for name in _globals(function.__code__)]
    return any(one is wanted or (isinstance(one, FunctionType) and _reaches(one, wanted, seen)) for one in called)


def _names(code: CodeType) -> set[str]:
    """The global and attribute names that code uses, functions within it included."""
    return {name for part in _parts(code) for name in part.co_names}


def _globals(code: CodeType) -> set[str]:
    """The global names that code uses, functions within it included."""
    return {one.argval for part in _parts(code) for one in dis.get_instructions(part) if one.opname == "LOAD_GLOBAL"}


def _parts(code: CodeType) -> Iterator[CodeType]:
    """A code object, and those of the functions within it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _parts(part)
