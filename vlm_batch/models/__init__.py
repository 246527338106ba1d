"""The families: one file each, named after the family. Importing this package imports none; asking for one imports all.

Families of other packages are found by the entry point group ``vlm_batch.families``, whose entries name modules, or are
registered by whoever imports their module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
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

#: The group of entry points by which other packages make families known.
ENTRY_POINTS = "vlm_batch.families"
#: The names that mlx-vlm's loader needs in the package of a model type.
NEEDED = ("Model", "ModelConfig")


def register(spec: ModelSpec) -> Callable[[registry.AdapterType], registry.AdapterType]:
    """Class decorator: make a family of one's own known, with its adapter, before a model of it is loaded.

    The library's own families are imported first, so that a family or model type that is taken is refused here, whatever was
    imported when. The same class again (a notebook's cell that is run twice) takes the place of what it was. Raises ValueError.
    """
    _import_own()
    return registry.register(spec)


def families() -> tuple[ModelSpec, ...]:
    """Every registered family, by name."""
    _import_all()
    return registered()


def spec_for(model_type: str) -> ModelSpec | None:
    """The family that serves a model type, or None."""
    return next((spec for spec in families() if model_type in spec.model_types), None)


def adapter_for(model_type: str) -> type[Adapter]:
    """The adapter class of a model type. Raises UnsupportedModel, naming the known families, if there is none."""
    spec = spec_for(model_type)
    if spec is None or spec.adapter is None:
        known = ", ".join(s.family for s in families())
        raise UnsupportedModel(f"model type {model_type!r} is not known; the known families are {known}")
    return spec.adapter


def package_of(model_type: str) -> ModuleType | None:
    """The model code of a family that names its own ``package``; None where mlx-vlm has it.

    Raises UnsupportedModel where the package cannot be imported, lacks what a loader needs, or is not needed.
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
        raise UnsupportedModel(f"{spec.family}: its model code {spec.package!r} cannot be imported: {error}") from error
    if missing := [needed for needed in NEEDED if needed not in vars(package)]:
        raise UnsupportedModel(f"{spec.family}: its model code {spec.package!r} has no {' and no '.join(missing)}")
    return package


def _import_all() -> None:
    _import_own()
    _import_entry_points()


@cache
def _import_own() -> None:
    """Import every file of a family, which registers it."""
    for module in iter_modules(__path__):
        if not module.name.startswith("_"):
            import_module(f"{__name__}.{module.name}")


@cache
def _import_entry_points() -> None:
    """Import the modules that other packages name; one that fails is said and left out."""
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception as error:
            warnings.warn(
                f"the families of {entry.value} (entry point {entry.name!r}) are left out: {type(error).__name__}: {error}",
                stacklevel=2,
            )
