"""Structural copies of mlx-vlm's module trees, which leave the caller's as they are, and modules that replace others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.hooks import current
from vlm_batch.adapters.joint import Kind, TowerCall, join_calls
from vlm_batch.arrays import arrays_of, is_array_tree, join_rows, launch, split_rows
from vlm_batch.store.digest import digest, split_known
from vlm_batch.store.features import FeatureStore


def clone_modules(module: Any, patches: Mapping[type, type] | None = None) -> Any:
    """A structural copy of a module tree, or of several in a list or dict: the same weight arrays, own modules and attributes.

    What a forward pass leaves on a module (mlx-vlm keeps positions there) stays on the copy, and so do our changes.
    ``patches`` maps a module class to the subclass that takes its place.
    """
    return _clone(module, patches or {}, {})


def _clone(node: Any, patches: Mapping[type, type], seen: dict[int, Any]) -> Any:
    if isinstance(node, nn.Module):
        if id(node) not in seen:
            cls: Any = patches.get(type(node), type(node))
            seen[id(node)] = copy = dict.__new__(cls)  # a class's own may ask for its config
            copy.__dict__.update(node.__dict__)
            for name, child in node.items():
                dict.__setitem__(copy, name, _clone(child, patches, seen))
        return seen[id(node)]
    if type(node) is list:
        return [_clone(child, patches, seen) for child in node]
    if type(node) is tuple:
        return tuple(_clone(child, patches, seen) for child in node)
    if type(node) is dict:
        return {name: _clone(child, patches, seen) for name, child in node.items()}
    return node


class CutAnswer:
    """Goes before a module's class: it answers for the positions that a ``Call`` says. So the LM head runs once a prompt."""

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        """(B, L, D) of the module, cut to (B, 1, D); (L, 1, D) of a single row that is scored."""
        theirs: Any = super()
        hidden: mx.array = theirs.__call__(*args, **kwargs)
        call = current()
        if call.is_scored:
            return hidden[0][:, None]
        if call.ends is None:
            return hidden[:, -1:]
        return mx.take_along_axis(hidden, mx.array([end - call.begin - 1 for end in call.ends])[:, None, None], axis=1)


def cut_answer(module: Any) -> None:
    """Let a module of the working copy answer for the positions that a ``Call`` says."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (CutAnswer, kind), {"__module__": __name__})


def part_of(module: Any, path: str) -> Any:
    """The part of a module at a dotted path, or None."""
    return reduce(lambda owner, name: getattr(owner, name, None), path.split("."), module)


class RememberingTower(nn.Module):
    """A vision tower that looks at a picture once: features are kept by the digest of everything that it is given.

    Without a ``store`` nothing is kept. ``config`` is the model's. All else is the tower's own.
    """

    #: The reason why pictures of several requests are not encoded in one call; None where they are.
    why_apart: ClassVar[str | None] = "nobody has said how its pictures share a call"

    def __init__(self, tower: nn.Module, store: FeatureStore | None, config: Any) -> None:
        super().__init__()
        self.tower = tower
        self.__dict__.update(_store=store, _config=config)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The tower's answer: found together with those of other requests, remembered or new."""
        answers = current().answers
        return self.look(args, kwargs) if answers is None else answers.next(self, args, kwargs)

    def look(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The tower's answer, from the store or new. Only calls with arrays alone, in and out, are remembered."""
        key = self.key(args, kwargs)
        found = None if key is None else self._store.get(key)
        if found is None:
            found = self.fresh(args, kwargs)
            self.remember(key, found)
        return found

    def fresh(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The tower's answer, new: of hidden states, those of the layers that the model reads."""
        found = self.tower(*args, **kwargs)
        wanted = getattr(self._config, "vision_feature_layer", None) if kwargs.get("output_hidden_states") else None
        is_list = isinstance(found, (list, tuple)) and len(found) and isinstance(found[-1], (list, tuple))
        if wanted is None or not is_list:
            return found
        states = list(found[-1])
        kept = {range(len(states))[layer] for layer in ([wanted] if isinstance(wanted, int) else wanted)}
        return (*found[:-1], [state if index in kept else None for index, state in enumerate(states)])

    def key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes | None:
        """The digest of a call, or None for one that is not remembered."""
        if self._store is None:
            return None
        try:
            return digest([list(args), dict(kwargs)])
        except TypeError:
            return None

    def remember(self, key: bytes | None, features: Any) -> None:
        if key is not None and is_array_tree(features):
            launch(arrays_of(features))
            self._store.put(key, features)

    def kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kind | None:
        """Something that calls have in common which can be made as one; None for a call that is made alone."""
        return None

    def together(self, calls: Sequence[TowerCall]) -> list[Any]:
        """The answers to calls of one kind, made as one. Raises ValueError for an answer that cannot be taken apart."""
        raise NotImplementedError

    def each_once(self, calls: Sequence[TowerCall], make: Callable[[Sequence[TowerCall]], list[Any]]) -> list[Any]:
        """The answers to calls: remembered, or made with each other, those that are asked for twice once."""
        keys = [self.key(call.args, call.kwargs) for call in calls]
        found = [None if key is None else self._store.get(key) for key in keys]
        names = [at if key is None else key for at, key in enumerate(keys)]
        first = {name: at for at, name in reversed(list(enumerate(names))) if found[at] is None}
        places = sorted(first.values())
        if not places:
            return found
        parts = make([calls[at] for at in places])
        made = {names[at]: part for at, part in zip(places, parts, strict=True)}
        for at in places:
            self.remember(keys[at], made[names[at]])
        return [made[name] if known is None else known for name, known in zip(names, found, strict=True)]

    def apart(self, calls: Sequence[TowerCall]) -> list[Any]:
        """The answers to calls of one kind, each picture's by its own shape alone, however many there are; None where nothing
        is known of that but to make each call by itself."""
        return [None] * len(calls)

    def count_patches(self, call: TowerCall, patch: int) -> int:
        """The patches in a call, of ``patch`` values where it does not say how many there are."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name == "tower":
            return super().__getattr__(name)
        return getattr(super().__getattr__("tower"), name)


class RememberingBatchTower(RememberingTower):
    """The same for towers that take a batch of pictures or tiles of one size, along the first axis of every array.

    Calls of several requests with entries of one size are made as one: their arrays are joined along that axis.
    """

    why_apart = None

    def kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kind | None:
        arrays = arrays_of([list(args), dict(kwargs)])
        if not arrays or not all(array.ndim and array.shape[0] == arrays[0].shape[0] for array in arrays):
            return None
        return Kind.of(args, kwargs)

    def together(self, calls: Sequence[TowerCall]) -> list[Any]:
        return self.each_once(calls, self._as_one)

    def _as_one(self, calls: Sequence[TowerCall]) -> list[Any]:
        args, kwargs = join_calls(calls)
        parts = self.split(self.fresh(args, kwargs), calls)
        if parts is None:
            raise ValueError(f"the answer of {type(self.tower).__name__} cannot be taken apart")
        return parts

    def split(self, found: Any, calls: Sequence[TowerCall]) -> list[Any] | None:
        """Each call's share of an answer: as many entries of every array as the call has. None if that is not so."""
        counts = [call.arrays[0].shape[0] for call in calls]
        if any(array.ndim == 0 or array.shape[0] != sum(counts) for array in arrays_of(found)):
            return None
        return split_rows(found, counts)

    def count_patches(self, call: TowerCall, patch: int) -> int:
        return max(array.size for array in call.arrays) // patch


class RememberingListTower(RememberingBatchTower):
    """The same for towers that answer with a list of arrays, one for each picture of the batch."""

    def split(self, found: Any, calls: Sequence[TowerCall]) -> list[Any] | None:
        return split_list(found, [call.arrays[0].shape[0] for call in calls])


class RememberingRowTower(RememberingBatchTower):
    """The same for towers that answer for a batch of pictures of one size with one row (1, L, D), picture by picture."""

    def split(self, found: Any, calls: Sequence[TowerCall]) -> list[Any] | None:
        counts = [call.arrays[0].shape[0] for call in calls]
        if not isinstance(found, mx.array) or found.ndim != 3 or found.shape[0] != 1 or found.shape[1] % sum(counts):
            return None
        parts = split_rows(found[0], counts)
        return None if parts is None else [part[None] for part in parts]


class RememberingPackedTower(RememberingBatchTower):
    """The same for towers that take the patches of several pictures in a row and a grid for each, (N, ...) and (P, 2 or 3),
    and remember them together. They answer with rows in proportion to the patches, or with a list, one for each picture."""

    def kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kind | None:
        arrays = arrays_of([list(args), dict(sorted(kwargs.items()))])
        if len(arrays) != 2 or arrays[1].ndim != 2 or sum(num_patches(arrays[1])) != arrays[0].shape[0]:
            return None
        return Kind.of(args, kwargs)

    def split(self, found: Any, calls: Sequence[TowerCall]) -> list[Any] | None:
        if type(found) is list:
            return split_list(found, [call.arrays[1].shape[0] for call in calls])
        return split_rows(found, [call.arrays[0].shape[0] for call in calls])

    def count_patches(self, call: TowerCall, patch: int) -> int:
        return int(call.arrays[0].shape[0])


class RememberingGridTower(RememberingTower):
    """The same for towers that take the patches of several pictures in a row, with a grid for each: (N, ...), (P, 3).

    Every picture is remembered by itself; those that are new go through the tower together, each of them once. Calls of
    several requests are one with more pictures. Where a ``Call`` is fixed, a picture is always in a call of as many of its
    shape as that says, beside others or repeats of one, or alone.
    """

    why_apart = None

    def look(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        is_fixed = current().is_fixed
        is_one = len(args) != 2 or not isinstance(args[1], mx.array) or args[1].shape[0] == 1
        kind = None if not is_fixed and (is_one or self._store is None) else self.kind(args, kwargs)
        if kind is None:
            return super().look(args, kwargs)
        call = TowerCall(self, tuple(args), kwargs, kind)
        if is_fixed:
            return self.apart([call])[0]
        try:
            return join_rows(self.each_once(self._pictures(call), self.as_one))
        except ValueError:  # an answer that cannot be taken apart
            return self.fresh(args, kwargs)

    def kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kind | None:
        if len(args) != 2 or not all(isinstance(value, mx.array) for value in args) or args[1].ndim != 2:
            return None
        axis = patch_axis(args[0], num_patches(args[1]))
        if axis is None or arrays_of(dict(kwargs)):
            return None
        return Kind.of(args, kwargs, axis)

    def together(self, calls: Sequence[TowerCall]) -> list[Any]:
        if all(call.args[1].shape[0] == 1 for call in calls):
            return self.each_once(calls, self.as_one)
        return self._shares(self.look(self._joined(calls), calls[0].kwargs), calls)

    def apart(self, calls: Sequence[TowerCall]) -> list[Any]:
        pictures = [self._pictures(call) for call in calls]
        found = iter(self.each_once([picture for several in pictures for picture in several], self._by_shapes))
        answers = []
        for call, several in zip(calls, pictures, strict=True):
            alone = [next(found) for _ in several]
            if len(alone) == 1:
                answers += alone
            elif all(array.ndim == 2 for array in arrays_of(alone)):
                answers.append(join_rows(alone))
            else:  # an answer that is not one row for so many patches
                answers.append(RememberingTower.look(self, call.args, call.kwargs))
        return answers

    def _by_shapes(self, calls: Sequence[TowerCall]) -> list[Any]:
        """The answers to calls of one picture each, made with those of the same shape, so many at a time as a ``Call`` says."""
        shapes: dict[tuple[Any, ...], list[int]] = {}
        for at, call in enumerate(calls):
            shapes.setdefault(call.shape, []).append(at)
        found: dict[int, Any] = {}
        pictures = current().pictures
        for places in shapes.values():
            count = 1 if pictures is None else pictures(calls[places[0]])
            for start in range(0, len(places), count):
                part = places[start : start + count]
                found |= zip(part, self.as_one([calls[at] for at in part], count), strict=True)
        return [found[at] for at in range(len(calls))]

    def as_one(self, calls: Sequence[TowerCall], count: int = 1) -> list[Any]:
        """The answers of one call of the tower to several of one picture each, with repeats of the first up to ``count``,
        whatever is remembered. Raises ValueError for an answer that cannot be taken apart."""
        filled = [*calls, *[calls[0]] * (count - len(calls))]
        if len(filled) == 1:
            return [self.fresh(calls[0].args, calls[0].kwargs)]
        return self._shares(self.fresh(self._joined(filled), calls[0].kwargs), filled)[: len(calls)]

    def _pictures(self, call: TowerCall) -> list[TowerCall]:
        """A call in calls of one picture each."""
        pixels, grids = call.args
        parts = split_patches(pixels, num_patches(grids)) or [pixels]
        if len(parts) == 1:
            return [call]
        return [TowerCall(self, (part, grids[at : at + 1]), call.kwargs, call.kind) for at, part in enumerate(parts)]

    def _joined(self, calls: Sequence[TowerCall]) -> tuple[mx.array, mx.array]:
        """The patches and grids of all calls."""
        axis = patch_axis(calls[0].args[0], num_patches(calls[0].args[1]))
        return (
            mx.concatenate([call.args[0] for call in calls], axis=axis),
            mx.concatenate([call.args[1] for call in calls]),
        )

    def _shares(self, found: Any, calls: Sequence[TowerCall]) -> list[Any]:
        """Each call's part of an answer to all. Raises ValueError for an answer that cannot be taken apart."""
        parts = split_rows(found, [sum(num_patches(call.args[1])) for call in calls])
        if parts is None:
            raise ValueError(f"the answer of {type(self.tower).__name__} cannot be taken apart")
        return parts

    def count_patches(self, call: TowerCall, patch: int) -> int:
        return sum(num_patches(call.args[1]))


def apart(tower_class: type[RememberingTower], why: str) -> type[RememberingTower]:
    """The same wrapper for a tower that encodes the pictures of each request in calls of their own, and why it does."""
    return type(tower_class.__name__, (tower_class,), {"why_apart": why})


def split_list(found: Any, counts: Sequence[int]) -> list[Any] | None:
    """A list in parts of ``counts``, or None if it is none of so many."""
    if type(found) is not list or len(found) != sum(counts):
        return None
    ends = np.cumsum(counts).tolist()
    return [found[end - count : end] for count, end in zip(counts, ends, strict=True)]


def num_patches(grids: mx.array) -> list[int]:
    """The patches of each picture, of grids (P, 2 or 3)."""
    found: list[int] = np.array(grids).prod(axis=1).tolist()
    return found


def patch_axis(pixels: mx.array, counts: Sequence[int]) -> int | None:
    """The axis of the patches of pictures that have ``counts``: the first, the second if there is one row, or None."""
    return next((axis for axis in (0, 1) if pixels.shape[: axis + 1] == (1,) * axis + (sum(counts),)), None)


def split_patches(pixels: mx.array, counts: Sequence[int]) -> list[mx.array] | None:
    """The patches of each picture, or None if there are not as many as they have."""
    axis = patch_axis(pixels, counts)
    if axis is None:
        return None
    if len(counts) == 1:
        return [pixels]  # itself: its digest may be known
    ends: list[int] = np.cumsum(counts)[:-1].tolist()
    return split_known(pixels, ends, axis)


def evaluate_arrays(module: nn.Module) -> None:
    """Evaluate every array that a module tree holds, parameter or not; tables on disk are left out.

    An array still unevaluated belongs to the thread that made it; the engine thread could not use it.
    """
    mx.eval(list(_arrays(module)))


def package_of(value: Any) -> str:
    """The package that the class of an object comes from."""
    return type(value).__module__.partition(".")[0]


def tables_on_disk(module: nn.Module) -> list[Any]:
    """The modules of a tree that read the rows they are asked for from the checkpoint's files."""
    return [child for _, child in module.named_modules() if _is_on_disk(child)]


def _is_on_disk(node: Any) -> bool:
    return hasattr(type(node), "_read_rows")  # as mlx-vlm's only class of the kind calls it: OffloadedEngramEmbedding


def leave_on_disk(module: nn.Module) -> None:
    """Take the tables that stay on disk out of a module tree.

    mlx-vlm hangs them into the tree for conversions to other formats, not read yet: hundreds of gigabytes.
    """
    for table in tables_on_disk(module):
        for name in ("weight", "scales", "biases"):
            table.pop(name, None)
        table.__dict__.pop("_source_embedding", None)


def _arrays(module: nn.Module) -> Iterator[mx.array]:
    """Arrays of modules, and of other objects whose classes come from the modules' packages.

    ``seen`` holds the objects themselves: one that is gone would leave its id to another.
    """
    packages = {package_of(child) for _, child in module.named_modules()} | {"mlx_vlm"}
    leaves = (str, bytes, int, float, type)
    seen: dict[int, Any] = {}

    def walk(node: Any) -> Iterator[mx.array]:
        if isinstance(node, mx.array):
            yield node
            return
        if id(node) in seen or isinstance(node, leaves) or _is_on_disk(node):
            return
        seen[id(node)] = node
        children: list[Any] = []
        if isinstance(node, Mapping):  # a module is one, too
            children.extend(node.values())
        elif isinstance(node, (list, tuple)):
            children.extend(node)
        if package_of(node) in packages:
            children.append(getattr(node, "__dict__", {}))
        for child in children:
            yield from walk(child)

    return walk(module)


def two_tables(parent: type) -> type:
    """An embedding of two tables that looks both up, instead of joining them for every forward as upstream does.

    ``parent`` has ``embedding`` (V, D) and ``new_embedding`` (W, D); ids from V on are the second one's.
    """

    class TwoTables(parent):  # type: ignore[misc]
        def __call__(self, ids: mx.array) -> mx.array:
            """(B, L) -> (B, L, D)"""
            size = self.embedding.shape[0]
            is_new = ids >= size
            old, new = self.embedding[mx.where(is_new, 0, ids)], self.new_embedding[mx.where(is_new, ids - size, 0)]
            return mx.where(is_new[..., None], new, old)

    return TwoTables
