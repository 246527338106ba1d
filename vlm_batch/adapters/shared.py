"""Linear layers with one input, such as queries and keys, as one product.

A trial forward finds layers that always get the same array. Last bits may change, so the joined model has its own fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.few_rows import THEIRS, suit_few_rows
from vlm_batch.adapters.modules import clone_modules, evaluate_arrays
from vlm_batch.adapters.operations import LINEAR
from vlm_batch.caches import LayerCache, Placement, kind_of
from vlm_batch.errors import is_out_of_memory
from vlm_batch.records import Call, DecodeStep

#: Layer classes that can be joined -> their arrays with one row per output.
ARRAYS: dict[type, tuple[str, ...]] = {
    kind: ("weight", "scales", "biases", "bias")
    if issubclass(kind, nn.QuantizedLinear)
    else ("weight", "bias")
    for kind in LINEAR
}
#: A module, and some of its layers by name.
Group: TypeAlias = tuple[nn.Module, dict[str, nn.Module]]
#: By an object's id, the modules that hold it, and under which names.
Holders: TypeAlias = dict[int, list[tuple[nn.Module, str]]]
#: The trial's prompt; its last token is a chunk of its own.
PROMPT = (3, 4, 5)


class Wide(nn.Module):
    """Several linear layers as one; its input is held until the last part is taken."""

    def __init__(self, linear: nn.Module, cuts: Sequence[int]) -> None:
        super().__init__()
        self.linear = linear
        self.__dict__.update(_cuts=list(cuts), _rows=None, _parts={})

    def part(self, at: int, rows: mx.array) -> mx.array:
        own = self.__dict__
        if own["_rows"] is not rows or at not in own["_parts"]:
            own["_rows"], own["_parts"] = (
                rows,
                dict(enumerate(mx.split(self.linear(rows), own["_cuts"], axis=-1))),
            )
        found: mx.array = own["_parts"].pop(at)
        if not own["_parts"]:
            own["_rows"] = None
        return found


class JoinedPart(nn.Module):
    """One layer of a ``Wide``, in the original's place."""

    def __init__(self, wide: Wide, at: int) -> None:
        super().__init__()
        # an underscore hides the wide layer from parameters, so that its weights count once
        name = "wide" if at == 0 else "_wide"
        self[name] = wide
        self.__dict__.update(_name=name, _at=at)

    def __call__(self, rows: mx.array) -> mx.array:
        wide: Wide = self[self.__dict__["_name"]]
        return wide.part(self.__dict__["_at"], rows)


def share_products(adapter: Adapter, model: nn.Module | None = None) -> int:
    """Join linear layers with one input in an adapter's language model.

    Models that fail a text trial, or have no memory left to join, stay unchanged.

    Args:
        model: The caller's model, whose weights become views.

    Returns:
        The number of joined layers.
    """
    groups = shared_layers(adapter)
    if not groups:
        suit_few_rows(adapter.language)
        return 0
    trees = [adapter.model] if model is None else [adapter.model, model]
    if not _are_joined(groups, _holders(trees)) or not _is_tried(adapter):
        _part_again(groups)
        return 0
    suit_few_rows(adapter.language)
    return sum(len(layers) for _, layers in groups)


def _holders(trees: Sequence[nn.Module]) -> Holders:
    """Return which modules of the trees hold each array of a linear layer."""
    holders: Holders = {}
    for tree in trees:
        for module in tree.modules():
            names = ARRAYS.get(type(module), ())
            for name in module.keys() & set(names):
                holders.setdefault(id(module[name]), []).append((module, name))
    return holders


def _part_again(groups: Sequence[Group]) -> None:
    for owner, layers in groups:
        for name, layer in layers.items():
            owner[name] = layer


def _are_joined(groups: Sequence[Group], holders: Holders) -> bool:
    """Join groups of layers; return False if memory ends. A group's weights are held twice meanwhile."""
    try:
        for owner, layers in groups:
            wide = widened(list(layers.values()), holders)
            for at, name in enumerate(layers):
                owner[name] = JoinedPart(wide, at)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def shared_layers(adapter: Adapter) -> list[Group]:
    """Group layers that always get the same arrays: (module, layers by name)."""
    single = _held_once(adapter.language)
    layers = [owner[name] for owner, name in single.values()]
    with _recorded(layers) as given:
        if not _is_tried(adapter):
            return []
    found: dict[Any, Group] = {}
    for layer, arrays in given.items():
        owner, name = single[layer]
        key = (id(owner), tuple(map(id, arrays)), _kind(owner[name]))
        _, own = found.setdefault(key, (owner, {}))
        own[name] = owner[name]
    return [(owner, own) for owner, own in found.values() if len(own) > 1]


def _held_once(model: nn.Module) -> dict[int, tuple[nn.Module, str]]:
    """Return (owner, name) of the linear layers that one module holds, by their ids."""
    owners: dict[int, tuple[nn.Module, str]] = {}
    several: set[int] = set()
    for owner in model.modules():
        for name, child in owner.items():
            if type(child) not in ARRAYS:
                continue
            if id(child) in owners:
                several.add(id(child))
            owners[id(child)] = (owner, name)
    for layer in several:
        del owners[layer]
    return owners


def _kind(layer: Any) -> tuple[Any, ...]:
    found: list[Any] = [THEIRS.get(type(layer), type(layer))]
    for name in ARRAYS[type(layer)]:
        if name in layer:
            found.append((name, layer[name].dtype, layer[name].shape[1:]))
    packing = map(vars(layer).get, ("group_size", "bits", "mode"))
    return (*found, *packing)


@contextmanager
def _recorded(layers: Sequence[Any]) -> Iterator[dict[int, list[mx.array]]]:
    given: dict[int, list[mx.array]] = {}

    def recording(kind: type) -> type:
        def call(layer: Any, rows: mx.array) -> Any:
            given.setdefault(id(layer), []).append(rows)
            return vars(kind)["__call__"](layer, rows)

        return type(kind.__name__, (kind,), {"__call__": call})

    kinds = {kind: recording(kind) for kind in ARRAYS}
    for layer in layers:
        layer.__class__ = kinds[type(layer)]
    try:
        yield given
    finally:
        for layer in layers:
            layer.__class__ = type(layer).__mro__[1]


def _is_tried(adapter: Adapter) -> bool:
    """Whether a prompt's chunks and a decode step run.

    They are computed, and so is what modules have made and kept: other threads cannot use unevaluated arrays.
    """
    places = 1 if adapter.spec.max_rows == 1 else 2
    placement = Placement.for_device()
    layers: list[LayerCache] = []
    logits: list[mx.array] = []
    extras: list[Mapping[str, Any]] = []
    ids = mx.array([PROMPT], dtype=mx.int32)
    try:
        for place in range(places):
            encoded = adapter.encode({"input_ids": ids}, Call(is_made_up=True))
            cache = adapter.make_cache()
            last = len(PROMPT) - 1
            logits.append(adapter.prefill([encoded], cache, 0, last))
            logits.append(adapter.prefill([encoded], cache, last, last + 1))
            adapter.finish_prefill(encoded, cache)
            if not layers:
                kinds = map(kind_of, cache)
                layers = [kind.batched(placement, places) for kind in kinds]
            for layer, single in zip(layers, cache, strict=True):
                layer.resize(places)
                layer.put(place, single)
            extras.append(encoded.decode)
        tokens = mx.array([PROMPT[:1]] * places, dtype=mx.int32)
        positions = mx.array([len(PROMPT)] * places, dtype=mx.int32)
        mx.eval(logits, adapter.decode(DecodeStep(tokens, positions, layers, extras)))
        evaluate_arrays(adapter.language)
    except Exception:  # from the model's code
        return False
    return True


def widened(
    layers: Sequence[Any], holders: Mapping[int, Sequence[tuple[nn.Module, str]]] = {}
) -> Wide:
    """Join layers; their arrays, also those in ``holders`` by id, become views."""
    linear = clone_modules(layers[0])
    ends = list(accumulate(layer["weight"].shape[0] for layer in layers))
    for name in ARRAYS[type(linear)]:
        if name not in linear:
            continue
        whole = mx.concatenate([layer[name] for layer in layers])
        linear[name] = whole
        mx.eval(whole)
        for (begin, end), layer in zip(pairwise([0, *ends]), layers, strict=True):
            part = whole[begin:end]
            mx.eval(part)
            for module, known in holders.get(id(layer[name]), [(layer, name)]):
                module[known] = part
    return Wide(linear, ends[:-1])
