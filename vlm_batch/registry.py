"""Facts about families: one ``ModelSpec`` each, registered with its adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

AdapterType = TypeVar("AdapterType", bound=type[Any])


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Facts about one family.

    Attributes:
        family: Its name.
        model_types: Served values of ``model_type`` in ``config.json``.
        package: Module of the model's code (``Model``, ``ModelConfig``, ...); None: mlx-vlm's.
        images: It reads pictures.
        multi_image: It reads several pictures in one request.
        video: Videos are verified; ``no_video`` says why they are not.
        audio: Recordings are verified; ``no_audio`` says why they are not.
        audio_seconds: Longest recording that the published model hears; None: what its context holds.
        chunked_prefill: Its prompts may be prefilled in chunks.
        notes: Sentences for readers on what the adapter patches.
        known_gaps: (parity scenario, reason) of each failure, which the tests strictly expect.
        not_on_cuda: (model type, reason) of each type refused on CUDA.
        no_prefix_reuse: Why a row cannot continue another row's caches; None if it can.
        max_rows: Most rows in a batch; None leaves it to the caller.
        special_tokens: (special token, source) of each kind of checkpoint that answers in special tokens, known by its
            having that token: they are shown unless a request says ``skip_special_tokens=True``.
        adapter: The adapter's class; ``register`` fills it in.
    """

    family: str
    model_types: tuple[str, ...]
    package: str | None = None
    images: bool = True
    multi_image: bool = True
    video: bool = False
    no_video: str = "mlx-vlm has no processor that makes inputs of its videos"
    audio: bool = False
    audio_seconds: float | None = None
    no_audio: str = "its model has no part that hears"
    chunked_prefill: bool = True
    notes: tuple[str, ...] = ()
    known_gaps: tuple[tuple[str, str], ...] = ()
    not_on_cuda: tuple[tuple[str, str], ...] = ()
    no_prefix_reuse: str | None = None
    max_rows: int | None = None
    special_tokens: tuple[tuple[str, str], ...] = ()
    adapter: type[Any] | None = None


_SPECS: dict[str, ModelSpec] = {}


def register(spec: ModelSpec) -> Callable[[AdapterType], AdapterType]:
    """Class decorator: make an adapter known under its spec.

    The same class again, as from a notebook's cell, replaces the earlier one.

    Raises:
        ValueError: The family or a model type belongs to another adapter.
    """

    def add(adapter: AdapterType) -> AdapterType:
        for other in _SPECS.values():
            if not _is_same(other.adapter, adapter):
                _check_apart(spec, adapter, other)
        for family, other in list(_SPECS.items()):
            if _is_same(other.adapter, adapter):
                del _SPECS[family]
        bound = replace(spec, adapter=adapter)
        _SPECS[spec.family] = bound
        adapter.spec = bound  # type: ignore[attr-defined]
        return adapter

    return add


def _check_apart(spec: ModelSpec, adapter: type, other: ModelSpec) -> None:
    """Raise ValueError if another adapter has the family or one of its model types."""
    mine, theirs = _called(adapter), _called(other.adapter)
    if other.family == spec.family:
        raise ValueError(
            f"family {spec.family!r} is registered twice: {theirs}, {mine}"
        )
    for model_type in set(spec.model_types) & set(other.model_types):
        raise ValueError(
            f"model type {model_type!r} of {spec.family!r} ({mine}) is already registered by "
            f"{other.family!r} ({theirs})"
        )


def _is_same(one: type | None, other: type) -> bool:
    return one is not None and _called(one) == _called(other)


def _called(adapter: type | None) -> str:
    if adapter is None:
        return "no adapter"
    return f"{adapter.__module__}.{adapter.__qualname__}"


def registered() -> tuple[ModelSpec, ...]:
    """Return the families registered so far, by name; ``vlm_batch.families()`` imports the library's own first."""
    return tuple(_SPECS[name] for name in sorted(_SPECS))
