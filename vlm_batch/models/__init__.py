"""The families, one file each, imported when first needed.

Other packages add families by ``register`` or the entry points ``vlm_batch.families``.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from difflib import SequenceMatcher
from functools import cache
from importlib import import_module, resources
from importlib.metadata import entry_points
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING

from vlm_batch import registry
from vlm_batch.errors import UnsupportedModel
from vlm_batch.registry import ModelSpec, registered

if TYPE_CHECKING:
    from vlm_batch.adapters.base import Adapter

#: Group of entry points that name modules with families.
ENTRY_POINTS = "vlm_batch.families"
#: Least likeness (difflib's ratio) of two names of which one may be meant for the other.
NEAR = 0.7
#: The names that mlx-vlm's loader needs in the package of a model type.
NEEDED = ("Model", "ModelConfig")


def register(spec: ModelSpec) -> Callable[[registry.AdapterType], registry.AdapterType]:
    """Class decorator: register a family before loading its model.

    The same class, registered again, replaces the earlier one.

    Raises:
        ValueError: The family or model type is taken.
    """
    _import_own()
    return registry.register(spec)


def families() -> tuple[ModelSpec, ...]:
    """Return every registered family, by name."""
    _import_own()
    _import_entry_points()
    return registered()


def spec_for(model_type: str) -> ModelSpec | None:
    """Return a model type's family, or None."""
    _import_naming(model_type)
    _import_entry_points()
    return next((spec for spec in registered() if model_type in spec.model_types), None)


def adapter_for(model_type: str) -> type[Adapter]:
    """Return a model type's adapter class. Raises UnsupportedModel."""
    spec = spec_for(model_type)
    if spec is None or spec.adapter is None:
        raise UnsupportedModel(not_known(model_type))
    found: type[Adapter] = spec.adapter
    return found


def not_known(model_type: str) -> str:
    """Say that a type is unknown, the nearest known ones first."""
    near = near_types(model_type)
    nearest = (
        f"the nearest are {', '.join(near)}" if near else "no other is spelled like it"
    )
    return f"model type {model_type!r} is not known; {nearest}. vlm-batch families lists all {len(families())} families"


def near_types(model_type: str, most: int = 5) -> list[str]:
    """Return known model types and families that are spelled like ``model_type``, the nearest first."""
    known = sorted(
        {name for spec in families() for name in (*spec.model_types, spec.family)}
    )
    # one of each spelling
    plain = {
        name: spelled
        for spelled, name in {_plain(name): name for name in known}.items()
    }
    asked = _plain(model_type)
    likeness = {
        name: SequenceMatcher(None, asked, spelled).ratio()
        for name, spelled in plain.items()
    }
    # "minicpmv" is minicpmv4_6's beginning, and "minicpmv4_5" shares most of it.
    begins = {
        name
        for name, spelled in plain.items()
        if spelled.startswith(asked) or asked.startswith(spelled)
    }
    near = [name for name in plain if likeness[name] >= NEAR or name in begins]
    return sorted(near, key=lambda name: (name not in begins, -likeness[name], name))[
        :most
    ]


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def package_of(model_type: str) -> ModuleType | None:
    """Return the model code of a family's own ``package``, else None.

    Raises:
        UnsupportedModel: The package is broken, or mlx-vlm has the code.
    """
    spec = spec_for(model_type)
    if spec is None or spec.package is None:
        return None
    if find_spec(f"mlx_vlm.models.{model_type}") is not None:
        raise UnsupportedModel(
            f"{spec.family}: mlx-vlm has code for {model_type!r}: leave package={spec.package!r} out"
        )
    try:
        package = import_module(spec.package)
    except ImportError as error:
        raise UnsupportedModel(
            f"{spec.family}: its model code {spec.package!r} cannot be imported: {error}"
        ) from error
    if missing := [needed for needed in NEEDED if needed not in vars(package)]:
        raise UnsupportedModel(
            f"{spec.family}: its model code {spec.package!r} has no {' and no '.join(missing)}"
        )
    return package


@cache
def _import_own() -> None:
    for name in _files():
        import_module(f"{__name__}.{name}")


@cache
def _import_naming(model_type: str) -> None:
    """Import the files that name a type; without sources, all of them."""
    said = json.dumps(model_type).encode()
    for name in _files():
        source = resources.files(__name__) / f"{name}.py"
        if not source.is_file() or said in source.read_bytes():
            import_module(f"{__name__}.{name}")


def _files() -> list[str]:
    return [
        module.name
        for module in iter_modules(__path__)
        if not module.name.startswith("_")
    ]


@cache
def _import_entry_points() -> None:
    """Import other packages' families; warn of failures."""
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception as error:
            warnings.warn(
                f"the families of {entry.value} (entry point {entry.name!r}) are left out: {type(error).__name__}: {error}",
                stacklevel=2,
            )
