"""Changes to vision towers that several families share: activations, learned positions, and widths that are fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters import kernels
from vlm_batch.adapters.modules import RememberingTower
from vlm_batch.adapters.vision import resize_bicubic
from vlm_batch.store.features import FeatureStore

#: Why pictures of several requests do not share a call of some towers.
PICTURES_MASKED_APART = (
    "its tower masks pictures apart in one attention over all of them: the work grows with its square, and what is not finite "
    "in one reaches the others"
)


#: Names under which models keep their vision towers.
VISION_TOWERS = ("vision_tower", "vision_model", "vision_encoder", "vision", "visual")


def vision_towers(model: Any) -> list[tuple[nn.Module, str]]:
    """The modules that encode a model's pictures: each the attribute of another."""
    owner = model.get("thinker") or model  # the part of an omni model that reads
    return [(owner, name) for name in VISION_TOWERS if isinstance(owner.get(name), nn.Module)]


def remember_features(adapter: Any, store: FeatureStore | None) -> None:
    """Let an adapter's vision towers encode a picture once, and keep its features in ``store``, if there is one."""
    for owner, name in vision_towers(adapter.model):
        tower = owner[name]
        tower = tower.tower if isinstance(tower, RememberingTower) else tower
        setattr(owner, name, adapter.tower_class(tower, store, adapter.config))


@dataclass(frozen=True)
class Inner:
    """Linear layers of one module, by name, and the one that takes their outputs: through an activation that is 0 at 0, or
    as a product of which one factor is."""

    first: tuple[str, ...]
    last: str


GATED = Inner(("gate_proj", "up_proj"), "down_proj")


def widen(model: Any, names: Inner) -> None:
    """Fill the inner width of the MLPs in a working copy's towers with zeros, up to one for which products are fast on this
    device.

    Layers are left alone that are not dense, or whose width is fast. Sums get terms that are zero, so answers are the same
    up to rounding. The filled weights take the place of the caller's in the copy; they are made one MLP at a time.
    """
    for owner, name in vision_towers(model):
        for _, module in owner[name].named_modules():
            layers: list[Any] = [module.get(layer) for layer in (*names.first, names.last)]
            if all(type(layer) is nn.Linear for layer in layers):
                _widen(layers[:-1], layers[-1])


def _widen(first: list[Any], last: Any) -> None:
    width = last.weight.shape[1]
    missing = -width % kernels.FAST_WIDTH
    is_wanted = all(kernels.wants_fast_widths(layer.weight.dtype) for layer in (*first, last))
    if not missing or not is_wanted or any(layer.weight.shape[0] != width for layer in first):
        return
    for layer in first:
        layer.weight = mx.pad(layer.weight, [(0, missing), (0, 0)])
        if "bias" in layer:
            layer.bias = mx.pad(layer.bias, (0, missing))
    last.weight = mx.pad(last.weight, [(0, 0), (0, missing)])
    mx.eval([layer.parameters() for layer in (*first, last)])


def embed_by_product(parent: type[nn.Module]) -> type[nn.Module]:
    """An embedding of patches (N, values), which come one by one, as a product: (N, D).

    mlx-vlm's is a convolution of N pictures of one place each, as it is here where that costs nothing. On CUDA, MLX makes a
    cuDNN graph for every N (mlx/backend/cuda/conv.cpp, ``ConvCacheKey``).
    """

    class PatchProduct(parent):  # type: ignore[misc,valid-type]
        def __call__(self, hidden_states: mx.array) -> mx.array:
            if not kernels.counts_launches():
                return super().__call__(hidden_states)
            kernel = self.proj.weight  # (D, time, rows, columns, colours); a patch's values are colour by colour
            weight = kernel.transpose(0, 4, 1, 2, 3).reshape(len(kernel), -1)
            patches = hidden_states.reshape(-1, weight.shape[1])
            return mx.addmm(self.proj.bias, patches, weight.T) if "bias" in self.proj else patches @ weight.T

    return PatchProduct


def use_tanh_gelu(tower: nn.Module) -> None:
    """Give the working copy's tower GELU in its tanh form in place of the sigmoid's."""
    for _, module in tower.named_modules():
        if isinstance(module.get("activation_fn"), nn.GELU):
            module.activation_fn = nn.GELU(approx="tanh")


def resized_positions(parent: type[nn.Module]) -> type[nn.Module]:
    """MoonViT's learned positions, resized to each picture's grid by ``resize_bicubic``."""

    class ResizedPositions(parent):  # type: ignore[misc,valid-type]
        def __call__(self, x: mx.array, grids: mx.array, **shapes: Any) -> mx.array:
            """Patches (N, D) and grids (pictures, 2), or (clips, 3), which are upstream's own."""
            if grids.shape[1] != 2:
                return super().__call__(x, grids, **shapes)
            sizes = [(int(high), int(wide)) for high, wide in np.array(grids)]
            tables = [resize_bicubic(self.weight, size).flatten(0, 1) for size in sizes]
            return x + mx.concatenate(tables).astype(x.dtype)

    return ResizedPositions
