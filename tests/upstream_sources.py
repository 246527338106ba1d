"""Digests of mlx-vlm's functions that adapters replace: ``python -m tests.upstream_sources`` records them anew.

They are found, not listed: what a class in a family's ``patches()`` overrides, and any other class of this library that
inherits from mlx-vlm's; what hooks stand in for; a model's merge (``FamilyHooks.merge``); and a model's own two calls where an
adapter makes them by itself.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

from mlx_vlm.utils import get_model_type

import vlm_batch
from vlm_batch.adapters import attention, rotary, tables
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.family import FamilyHooks
from vlm_batch.adapters.grids import MRoPEAdapter
from vlm_batch.models import _kimi_k3, families, muse_spark

RECORD = Path(__file__).parent / "data" / "upstream_sources.json"
#: Methods of an adapter that make a call of the model's -> the class of the model's package and the method.
CALLS = {
    "features": ("Model", "get_input_embeddings"),
    "forward": ("LanguageModel", "__call__"),
}

#: Dotted name of a function of mlx-vlm's -> the digest of its source, and who replaces it.
Sources = dict[str, tuple[str, set[str]]]


def found() -> Sources:
    """Every function of the installed mlx-vlm that this library replaces."""
    sources: Sources = {}
    for who, function in (*_patched(), *_inherited(), *_hooked(), *_called()):
        function = inspect.unwrap(function)
        if not inspect.isfunction(function):
            continue
        # dataclasses make methods without a source
        has_source = function.__code__.co_filename != "<string>"
        if has_source and function.__module__.startswith("mlx_vlm."):
            name = f"{function.__module__}.{function.__qualname__}"
            sources.setdefault(name, (digest(function), set()))[1].add(who)
    return sources


def digest(function: Any) -> str:
    """Of a function's source, whatever stands around it."""
    source = textwrap.dedent(inspect.getsource(function))
    return hashlib.sha256(
        "\n".join(line.rstrip() for line in source.splitlines()).encode()
    ).hexdigest()[:16]


def differences(recorded: dict[str, Any], now: Sources) -> list[str]:
    """What has changed since the record was made, one line each."""
    before = recorded["functions"]
    lines = []
    for name in sorted(before.keys() | now.keys()):
        who = (
            ", ".join(sorted(now[name][1]))
            if name in now
            else ", ".join(before[name]["replaced_by"])
        )
        if name not in now:
            lines.append(f"{name} is no longer there, or no longer replaced by {who}")
        elif name not in before:
            lines.append(f"{name} is replaced by {who}, and not recorded")
        elif before[name]["digest"] != now[name][0]:
            lines.append(f"{name} has changed, and {who} replaces it")
    return lines


def record(sources: Sources) -> dict[str, Any]:
    """What the file holds."""
    return {
        "mlx_vlm": version("mlx-vlm"),
        "functions": {
            name: {"digest": digest_, "replaced_by": sorted(who)}
            for name, (digest_, who) in sorted(sources.items())
        },
    }


def overridden(ours: type, theirs: type) -> Iterator[Any]:
    """The functions of ``theirs`` that ``ours`` has others for, and functions of mlx-vlm's that it takes from elsewhere."""
    bases = (
        ours.__mro__[: ours.__mro__.index(theirs)]
        if theirs in ours.__mro__
        else (ours,)
    )
    for name, value in (item for base in bases for item in vars(base).items()):
        if _functions(value):
            yield from _functions(value)
            yield from _functions(inspect.getattr_static(theirs, name, None))


def _functions(value: Any) -> list[Any]:
    """The functions of a class attribute."""
    if isinstance(value, property):
        return [part for part in (value.fget, value.fset) if part is not None]
    if isinstance(value, cached_property):
        return [value.func]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    return [value] if inspect.isfunction(value) else []


def _adapters() -> Iterator[tuple[str, tuple[str, ...], type[Adapter]]]:
    for spec in families():
        if spec.adapter is not None and spec.adapter.__module__.startswith(
            "vlm_batch."
        ):
            yield spec.family, spec.model_types, spec.adapter


def _patched() -> Iterator[tuple[str, Any]]:
    for family, _, adapter in _adapters():
        for theirs, ours in adapter.patches().items():
            for function in overridden(ours, theirs):
                yield family, function


def _inherited() -> Iterator[tuple[str, Any]]:
    """What the library's module-level classes override of mlx-vlm's: caches, parts of processors."""
    for module in walk_packages(vlm_batch.__path__, "vlm_batch."):
        # packages that are extras, or that only tests of their own have
        if module.name.endswith(("__main__", ".docling", ".lmms_eval", ".mineru")):
            continue
        for value in list(vars(import_module(module.name)).values()):
            if isinstance(value, type) and value.__module__ == module.name:
                theirs = next(
                    (
                        base
                        for base in value.__mro__
                        if base.__module__.startswith("mlx_vlm.")
                    ),
                    None,
                )
                if theirs is not None:
                    for function in overridden(value, theirs):
                        yield module.name, function


def _hooked() -> Iterator[tuple[str, Any]]:
    for hook in attention.HOOKS.values():
        yield "every family", hook.theirs
    for hook in tables.HOOKS.values():
        yield "every family", hook.theirs
    for hook in muse_spark.without_metal().values():
        yield "muse_spark", hook.theirs
    for hook in _kimi_k3.HOOKS.values():
        yield "kimi_k3", hook.theirs
    for family, model_types, adapter in _adapters():
        if issubclass(adapter, MRoPEAdapter):
            for model_type in model_types:
                model = vars(import_module(package_of(model_type))).get("LanguageModel")
                applied = model and vars(sys.modules[model.__module__]).get(
                    rotary.APPLY
                )
                if applied:
                    yield family, applied


def _called() -> Iterator[tuple[str, Any]]:
    for family, model_types, adapter in _adapters():
        if adapter.merge is not None:
            for model_type in model_types:
                yield (
                    family,
                    getattr(
                        vars(import_module(package_of(model_type)))["Model"],
                        adapter.merge.name,
                    ),
                )
        for name, (owner, method) in CALLS.items():
            ours = inspect.unwrap(getattr(adapter, name))
            if ours.__module__ == FamilyHooks.__module__ or {"super", method} & set(
                ours.__code__.co_names
            ):
                continue
            for model_type in model_types:
                theirs = vars(import_module(package_of(model_type))).get(owner)
                if theirs is not None:
                    yield family, getattr(theirs, method)


def package_of(model_type: str) -> str:
    """mlx-vlm's package of a model type."""
    return f"mlx_vlm.models.{get_model_type({'model_type': model_type})}"


if __name__ == "__main__":
    sources = found()
    if RECORD.exists():
        print(
            "\n".join(
                differences(json.loads(RECORD.read_text(encoding="utf-8")), sources)
            )
            or "nothing has changed"
        )
    RECORD.write_text(json.dumps(record(sources), indent=1) + "\n", encoding="utf-8")
