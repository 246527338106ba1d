"""Facts about families: one frozen ``ModelSpec`` each, registered by the file that holds its adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from vlm_batch.adapters.base import Adapter

AdapterType = TypeVar("AdapterType", bound="type[Adapter]")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The facts about one family.

    ``model_types`` are the values of ``config.json``'s ``model_type`` that it serves. ``known_gaps`` names a parity
    scenario that fails and why, as data for the tests (strict expected failures). ``notes`` say what the adapter
    patches, for a reader. ``video`` says whether videos are verified; ``no_video`` why they are not.
    """

    family: str
    model_types: tuple[str, ...]
    images: bool = True
    multi_image: bool = True
    video: bool = False
    no_video: str = "mlx-vlm has no processor that makes inputs of its videos"
    chunked_prefill: bool = True
    notes: tuple[str, ...] = ()
    known_gaps: tuple[tuple[str, str], ...] = ()
    adapter: type[Adapter] | None = None


_SPECS: dict[str, ModelSpec] = {}


def register(spec: ModelSpec) -> Callable[[AdapterType], AdapterType]:
    """Class decorator: make an adapter known under its spec. A model type can belong to one family only."""

    def add(adapter: AdapterType) -> AdapterType:
        taken = {t: s.family for s in _SPECS.values() for t in s.model_types}
        for model_type in spec.model_types:
            if model_type in taken:
                raise ValueError(
                    f"model type {model_type!r} of {spec.family!r} is already registered by {taken[model_type]!r}"
                )
        if spec.family in _SPECS:
            raise ValueError(f"family {spec.family!r} is registered twice")
        bound = ModelSpec(**{**spec.__dict__, "adapter": adapter})
        _SPECS[spec.family] = bound
        adapter.spec = bound
        return adapter

    return add


def registered() -> tuple[ModelSpec, ...]:
    """The families registered so far, by name; ``vlm_batch.families()`` imports the library's own first."""
    return tuple(_SPECS[name] for name in sorted(_SPECS))
