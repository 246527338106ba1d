"""Facts about families: one frozen ``ModelSpec`` each, registered with the adapter that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from vlm_batch.adapters.base import Adapter

AdapterType = TypeVar("AdapterType", bound="type[Adapter]")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The facts about one family.

    ``model_types`` are the values of ``config.json``'s ``model_type`` that it serves. ``package`` is the dotted name of the
    module with the model's code, for a model type that mlx-vlm has no package for; it has what such a package has
    (``Model``, ``ModelConfig``, ``LanguageModel``, ...). ``known_gaps`` names a parity scenario that fails and why, as data
    for the tests (strict expected failures). ``notes`` say what the adapter patches, for a reader. ``video`` says whether
    videos are verified; ``no_video`` why they are not. ``not_on_cuda`` has model types that are refused on CUDA, each with
    what was seen there. ``no_prefix_reuse`` is the reason why a row cannot continue from another row's caches; None if it can.
    ``max_rows`` may share a batch; None leaves it to the caller.
    """

    family: str
    model_types: tuple[str, ...]
    package: str | None = None
    images: bool = True
    multi_image: bool = True
    video: bool = False
    no_video: str = "mlx-vlm has no processor that makes inputs of its videos"
    chunked_prefill: bool = True
    notes: tuple[str, ...] = ()
    known_gaps: tuple[tuple[str, str], ...] = ()
    not_on_cuda: tuple[tuple[str, str], ...] = ()
    no_prefix_reuse: str | None = None
    max_rows: int | None = None
    adapter: type[Adapter] | None = None


_SPECS: dict[str, ModelSpec] = {}


def register(spec: ModelSpec) -> Callable[[AdapterType], AdapterType]:
    """Class decorator: make an adapter known under its spec.

    A family and a model type can belong to one adapter only; the same class again (a notebook's cell that is run twice)
    takes the place of what it was. Raises ValueError.
    """

    def add(adapter: AdapterType) -> AdapterType:
        for other in _SPECS.values():
            if _is_same(other.adapter, adapter):
                continue
            if other.family == spec.family:
                raise ValueError(
                    f"family {spec.family!r} is registered twice: {_place(other.adapter)}, {_place(adapter)}"
                )
            for model_type in set(spec.model_types) & set(other.model_types):
                raise ValueError(
                    f"model type {model_type!r} of {spec.family!r} ({_place(adapter)}) is already registered by "
                    f"{other.family!r} ({_place(other.adapter)})"
                )
        for family in [other.family for other in _SPECS.values() if _is_same(other.adapter, adapter)]:
            del _SPECS[family]
        bound = replace(spec, adapter=adapter)
        _SPECS[spec.family] = bound
        adapter.spec = bound
        return adapter

    return add


def _is_same(one: type | None, other: type) -> bool:
    return one is not None and _place(one) == _place(other)


def _place(adapter: type | None) -> str:
    return "no adapter" if adapter is None else f"{adapter.__module__}.{adapter.__qualname__}"


def registered() -> tuple[ModelSpec, ...]:
    """The families registered so far, by name; ``vlm_batch.families()`` imports the library's own first."""
    return tuple(_SPECS[name] for name in sorted(_SPECS))
