"""Changes to towers that families share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters import operations
from vlm_batch.adapters.modules import RememberingBatchTower, RememberingTower
from vlm_batch.adapters.vision import resize_bicubic
from vlm_batch.store.features import FeatureStore

#: The reason why some towers do not join requests.
PICTURES_MASKED_APART = (
    "its tower masks pictures apart in one attention over all of them: the work grows with its square, and what is not finite "
    "in one reaches the others"
)


#: Attributes that hold vision and audio towers.
VISION_TOWERS = ("vision_tower", "vision_model", "vision_encoder", "vision", "visual")
AUDIO_TOWERS = ("audio_tower", "sound_encoder", "audio_encoder")


def vision_towers(model: Any) -> list[tuple[nn.Module, str]]:
    """Return (owner, attribute) of each vision tower."""
    return _towers(model, VISION_TOWERS)


def audio_towers(model: Any) -> list[tuple[nn.Module, str]]:
    return _towers(model, AUDIO_TOWERS)


def can_hear(model: Any) -> bool:
    """Whether a model has audio parts; some sizes have none."""
    return bool(_towers(model, (*AUDIO_TOWERS, "embed_audio")))


def _towers(model: Any, names: tuple[str, ...]) -> list[tuple[nn.Module, str]]:
    owner = model.get("thinker") or model  # omni models
    return [(owner, name) for name in names if isinstance(owner.get(name), nn.Module)]


def remember_features(adapter: Any, store: FeatureStore | None) -> None:
    """Wrap towers to store features; equally long recordings share calls unless the adapter has a ``sound_tower``."""
    sound_tower = getattr(adapter, "sound_tower", RememberingBatchTower)
    for towers, kind in (
        (vision_towers, adapter.tower_class),
        (audio_towers, sound_tower),
    ):
        for owner, name in towers(adapter.model):
            tower = owner[name]
            tower = tower.tower if isinstance(tower, RememberingTower) else tower
            setattr(owner, name, kind(tower, store, adapter.config))


@dataclass(frozen=True)
class Inner:
    """An MLP's first layers and its last, which reads zeros where these give zeros."""

    first: tuple[str, ...]
    last: str


GATED = Inner(("gate_proj", "up_proj"), "down_proj")


def widen(model: Any, names: Inner) -> None:
    """Pad towers' MLPs with zeros to fast widths; outputs change by rounding only."""
    for owner, name in vision_towers(model):
        for module in owner[name].modules():
            first: list[Any] = list(map(module.get, names.first))
            last: Any = module.get(names.last)
            if set(map(type, (*first, last))) == {nn.Linear}:
                _widen(first, last)


def _widen(first: list[Any], last: Any) -> None:
    width = last.weight.shape[1]
    if {layer.weight.shape[0] for layer in first} != {width}:
        return
    layers = [*first, last]
    steps = [operations.fast_width(layer.weight.dtype) for layer in layers]
    missing = -width % min(steps)
    if not missing:
        return
    for layer in first:
        layer.weight = mx.pad(layer.weight, [(0, missing), (0, 0)])
        if "bias" in layer:
            layer.bias = mx.pad(layer.bias, (0, missing))
    last.weight = mx.pad(last.weight, [(0, 0), (0, missing)])
    mx.eval([layer.parameters() for layer in layers])


def embed_by_product(parent: type[nn.Module]) -> type[nn.Module]:
    """Subclass a patch embedding (N, values) -> (N, D) to be a product where convolutions are slow."""

    class PatchProduct(parent):  # type: ignore[misc,valid-type]
        def __call__(self, hidden_states: mx.array) -> mx.array:
            found = operations.embed_by_product(self.proj, hidden_states)
            return super().__call__(hidden_states) if found is None else found

    return PatchProduct


def use_tanh_gelu(tower: nn.Module) -> None:
    for _, module in tower.named_modules():
        if isinstance(module.get("activation_fn"), nn.GELU):
            module.activation_fn = nn.GELU(approx="tanh")


def resized_positions(parent: type[nn.Module]) -> type[nn.Module]:
    """Subclass MoonViT's learned positions to use ``resize_bicubic``."""

    class ResizedPositions(parent):  # type: ignore[misc,valid-type]
        def __call__(self, x: mx.array, grids: mx.array, **shapes: Any) -> mx.array:
            """Add positions to patches (N, D) by grids (pictures, 2)."""
            if grids.shape[1] != 2:
                return super().__call__(x, grids, **shapes)
            sizes = [(int(high), int(wide)) for high, wide in np.array(grids)]
            tables = [resize_bicubic(self.weight, size).flatten(0, 1) for size in sizes]
            return x + mx.concatenate(tables).astype(x.dtype)

    return ResizedPositions
