"""The families: one file each, named after the family. Importing this package imports none; asking for one imports all."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from vlm_batch.errors import UnsupportedModel
from vlm_batch.registry import ModelSpec, registered

if TYPE_CHECKING:
    from vlm_batch.adapters.base import Adapter


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


@cache
def _import_all() -> None:
    """Import every family's file, which registers it."""
    for module in iter_modules(__path__):
        if not module.name.startswith("_"):
            import_module(f"{__name__}.{module.name}")
