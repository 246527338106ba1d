"""Copies of mlx-vlm's module trees, and modules that replace others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from importlib import import_module
from itertools import chain, islice
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.hooks import current
from vlm_batch.adapters.joint import CallKind, TowerCall, join_calls
from vlm_batch.arrays import (
    arrays_of,
    is_array_tree,
    join_rows,
    launch,
    map_arrays,
    split_rows,
)
from vlm_batch.records import Call
from vlm_batch.store.digest import digest, split_noted
from vlm_batch.store.features import FeatureStore


def clone_modules(module: Any, patches: Mapping[type, type] | None = None) -> Any:
    """Copy a tree, list or dict of modules, sharing weights; ``patches`` maps module classes to replacements."""
    return _clone(module, patches or {}, {})


def _clone(node: Any, patches: Mapping[type, type], seen: dict[int, Any]) -> Any:
    if isinstance(node, nn.Module):
        if id(node) not in seen:
            seen[id(node)] = _cloned_module(node, patches, seen)
        return seen[id(node)]
    clone = partial(_clone, patches=patches, seen=seen)
    if type(node) in (list, tuple):
        return type(node)(map(clone, node))
    if type(node) is dict:
        return {name: clone(child) for name, child in node.items()}
    return node


def _cloned_module(
    module: nn.Module, patches: Mapping[type, type], seen: dict[int, Any]
) -> Any:
    cls: Any = patches.get(type(module), type(module))
    # a class's own ``__new__`` may need its config
    copy = dict.__new__(cls)
    # before its children, which may hold it
    seen[id(module)] = copy
    copy.__dict__.update(module.__dict__)
    for name, child in module.items():
        dict.__setitem__(copy, name, _clone(child, patches, seen))
    return copy


def patches_in(module: str, *patched: tuple[str, Callable[[Any], type]]) -> Any:
    """Make ``patches`` of a module's ``PATCHES``, imported when asked for, and others as ``patching`` takes them."""
    return classmethod(
        lambda cls: {**import_module(module).PATCHES, **_replacements(patched)}
    )


def patching(*patched: tuple[str, Callable[[Any], type]]) -> Any:
    """Make ``patches`` of classes (names below ``mlx_vlm.models``) and makers of their replacements."""
    return classmethod(lambda cls: _replacements(patched))


def _replacements(
    patched: Sequence[tuple[str, Callable[[Any], type]]],
) -> dict[type, type]:
    return {(theirs := _class_at(path)): make(theirs) for path, make in patched}


def under(mixin: type) -> Callable[[Any], type]:
    """Return what makes a class's replacement: the class under a mixin."""
    return lambda parent: type(
        parent.__name__, (mixin, parent), {"__module__": mixin.__module__}
    )


def _class_at(path: str) -> Any:
    file, name = path.rsplit(".", 1)
    return vars(import_module(f"mlx_vlm.models.{file}"))[name]


class CutAnswer:
    """Mixin that cuts a module's output, so that the LM head runs once a prompt."""

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        """(B, L, D) -> (B, 1, D) at the call's positions, or (L, 1, D) for a scored row."""
        theirs: Any = super()
        hidden: mx.array = theirs.__call__(*args, **kwargs)
        call = current()
        if call.hidden is not None:
            call.hidden.append(hidden)
        if call.is_scored:
            return hidden[0][:, None]
        if call.ends is None:
            return hidden[:, -1:]
        last = mx.array([end - call.begin - 1 for end in call.ends])
        return mx.take_along_axis(hidden, last[:, None, None], axis=1)


def cut_answer(module: Any) -> None:
    module.__class__ = under(CutAnswer)(type(module))


def part_of(module: Any, path: str) -> Any:
    """Return the module at a dotted path, or None."""
    return reduce(
        lambda owner, name: getattr(owner, name, None), path.split("."), module
    )


class RememberingTower(nn.Module):
    """A tower that stores features in ``store``, if any, by its inputs' digest."""

    #: The reason why pictures of several requests are not encoded in one call; None where they are.
    why_apart: ClassVar[str | None] = "nobody has said how its pictures share a call"

    def __init__(
        self, tower: nn.Module, store: FeatureStore | None, config: Any
    ) -> None:
        super().__init__()
        self.tower = tower
        self.__dict__.update(_store=store, _config=config)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = current().tower_outputs
        if outputs is None:
            return self.look(args, kwargs)
        return outputs.next(self, args, kwargs)

    def look(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return stored or new features; only calls of arrays are stored."""
        key = self.key(args, kwargs)
        found = self.stored(key)
        if found is None:
            found = self.fresh(args, kwargs)
            self.remember(key, found)
        return found

    def stored(self, key: bytes | None) -> Any:
        """Return the features of a call's digest, if any."""
        return None if key is None else self._store.get(key)

    def fresh(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the tower; keep only hidden states that the model reads."""
        found = self.tower(*args, **kwargs)
        wanted = getattr(self._config, "vision_feature_layer", None)
        if wanted is None or not kwargs.get("output_hidden_states"):
            return found
        if not isinstance(found, (list, tuple)) or not found:
            return found
        *others, states = found
        if not isinstance(states, (list, tuple)):
            return found
        if isinstance(wanted, int):
            wanted = [wanted]
        kept: list[Any] = [None] * len(states)
        for layer in wanted:
            kept[layer] = states[layer]
        return (*others, kept)

    def key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes | None:
        """Return a call's digest, or None if unstored."""
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

    def kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallKind | None:
        """Return the kind of a call that can join others, or None."""
        return None

    def run_joined(self, calls: Sequence[TowerCall]) -> list[Any]:
        """Join calls of one kind; raise ValueError if the output cannot be split."""
        raise NotImplementedError

    def each_once(
        self,
        calls: Sequence[TowerCall],
        make: Callable[[Sequence[TowerCall]], list[Any]],
    ) -> list[Any]:
        """Return stored features; make missing ones together, duplicates once."""
        keys = [self.key(call.args, call.kwargs) for call in calls]
        found = list(map(self.stored, keys))
        missing: dict[bytes | int, list[int]] = {}
        for at, key in enumerate(keys):
            if found[at] is None:
                # a call that cannot be stored is like no other
                missing.setdefault(key or at, []).append(at)
        if not missing:
            return found
        parts = make([calls[first] for first, *_ in missing.values()])
        for indices, part in zip(missing.values(), parts, strict=True):
            self.remember(keys[indices[0]], part)
            for at in indices:
                found[at] = part
        return found

    def run_by_shape(self, calls: Sequence[TowerCall]) -> list[Any]:
        """Make calls whose features depend on a picture's own shape; None if unknown."""
        return [None] * len(calls)

    def taken_apart(self, parts: list[Any] | None) -> list[Any]:
        """Return an answer's parts; raise ValueError if there are none."""
        if parts is None:
            raise ValueError(
                f"the answer of {type(self.tower).__name__} cannot be taken apart"
            )
        return parts

    def shares_calls(self, call: Call) -> bool:
        """Whether several requests' media are encoded in one call."""
        if call.is_fixed:
            is_by_shape = type(self).run_by_shape is not RememberingTower.run_by_shape
            if call.pictures is None or not is_by_shape:
                return False
        return self.why_apart is None

    def count_patches(self, call: TowerCall, patch: int) -> int:
        """Count a call's patches, of ``patch`` values each."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name == "tower":
            return super().__getattr__(name)
        return getattr(super().__getattr__("tower"), name)


class RememberingBatchTower(RememberingTower):
    """A tower over pictures or tiles of one size, along the first axis of every array."""

    why_apart = None

    def kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallKind | None:
        arrays = arrays_of([list(args), dict(kwargs)])
        # scalars have none
        lengths = {array.shape[:1] for array in arrays}
        is_batch = len(lengths) == 1 and () not in lengths
        return CallKind.of(args, kwargs) if is_batch else None

    def run_joined(self, calls: Sequence[TowerCall]) -> list[Any]:
        return self.each_once(calls, self._as_one)

    def _as_one(self, calls: Sequence[TowerCall]) -> list[Any]:
        args, kwargs = join_calls(calls)
        return self.taken_apart(self.split(self.fresh(args, kwargs), calls))

    def split(self, found: Any, calls: Sequence[TowerCall]) -> list[Any] | None:
        """Split an output by calls; None if it does not fit."""
        counts = [call.arrays[0].shape[0] for call in calls]
        lengths = {array.shape[:1] for array in arrays_of(found)}
        if lengths - {(sum(counts),)}:
            return None
        return split_rows(found, counts)

    def count_patches(self, call: TowerCall, patch: int) -> int:
        return max(array.size for array in call.arrays) // patch


class RememberingListTower(RememberingBatchTower):
    def split(self, found: Any, calls: Sequence[TowerCall]) -> list[Any] | None:
        return split_list(found, [call.arrays[0].shape[0] for call in calls])


class RememberingRowTower(RememberingBatchTower):
    """A batch tower that returns one row (1, L, D)."""

    def split(self, found: Any, calls: Sequence[TowerCall]) -> list[Any] | None:
        counts = [call.arrays[0].shape[0] for call in calls]
        is_row = isinstance(found, mx.array) and found.shape[:-2] == (1,)
        if not is_row or found.shape[1] % sum(counts):
            return None
        parts = split_rows(found[0], counts)
        if parts is None:
            return None
        return [part[None] for part in parts]


class RememberingPackedTower(RememberingBatchTower):
    """A tower over packed patches (N, ...) and grids (P, 2 or 3), stored together.

    It returns rows in proportion to patches, or an array per picture.
    """

    def kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallKind | None:
        arrays = arrays_of([list(args), dict(sorted(kwargs.items()))])
        if len(arrays) != 2:
            return None
        patches, grids = arrays
        if grids.ndim != 2 or sum(num_patches(grids)) != patches.shape[0]:
            return None
        return CallKind.of(args, kwargs)

    def split(self, found: Any, calls: Sequence[TowerCall]) -> list[Any] | None:
        if type(found) is list:
            return split_list(found, [call.arrays[1].shape[0] for call in calls])
        return split_rows(found, [call.arrays[0].shape[0] for call in calls])

    def count_patches(self, call: TowerCall, patch: int) -> int:
        return int(call.arrays[0].shape[0])


class RememberingSizedTower(RememberingTower):
    """A tower over pictures (P, H, W, C), padded to the largest, and ``image_sizes`` (P, 2)."""

    why_apart = None

    def fresh(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # the last states are among those of the layers
        return super().fresh(args, kwargs)[1:]

    def kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallKind | None:
        """Return the kind of pictures of any size, if each has one: a call that does not fit must fail alone."""
        sizes = kwargs.get("image_sizes")
        if len(args) != 1 or not isinstance(sizes, mx.array):
            return None
        (pictures,) = args
        if pictures.ndim != 4 or sizes.shape != (len(pictures), 2):
            return None
        if not mx.issubdtype(sizes.dtype, mx.integer):
            return None
        kind = CallKind.of(args, kwargs)
        return kind._replace(shapes=(kind.shapes[0][2:], *kind.shapes[1:]))

    def run_joined(self, calls: Sequence[TowerCall]) -> list[Any]:
        return self.each_once(calls, self._as_one)

    def _as_one(self, calls: Sequence[TowerCall]) -> list[Any]:
        sizes = [np.array(call.kwargs["image_sizes"]) for call in calls]
        found = self.fresh(
            [[call.args[0] for call in calls]],
            {**calls[0].kwargs, "image_sizes": mx.array(np.concatenate(sizes))},
        )
        counts = [self.count_patches(call, 0) for call in calls]
        parts = split_rows(map_arrays(found, lambda states: states[0]), counts)
        return [
            map_arrays(part, lambda states: states[None])
            for part in self.taken_apart(parts)
        ]

    def count_patches(self, call: TowerCall, patch: int) -> int:
        side = self._config.vision_config.patch_size
        return int((np.array(call.kwargs["image_sizes"]) // side).prod(axis=1).sum())


class RememberingGridTower(RememberingTower):
    """A tower over packed patches (N, ...) and grids (P, 3), stored per picture.

    In a fixed ``Call``, each shape has a fixed number of pictures, with repeats.
    """

    why_apart = None

    def look(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        is_fixed = current().is_fixed
        if not is_fixed and (self._store is None or _has_one_picture(args)):
            return super().look(args, kwargs)
        kind = self.kind(args, kwargs)
        if kind is None:
            return super().look(args, kwargs)
        call = TowerCall(self, tuple(args), kwargs, kind)
        if is_fixed:
            return self.run_by_shape([call])[0]
        try:
            return join_rows(self.each_once(self._pictures(call), self.as_one))
        except ValueError:  # the output cannot be split
            return self.fresh(args, kwargs)

    def kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallKind | None:
        if len(args) != 2 or arrays_of(dict(kwargs)):
            return None
        pixels, grids = args
        are_arrays = isinstance(pixels, mx.array) and isinstance(grids, mx.array)
        if not are_arrays or grids.ndim != 2:
            return None
        axis = patch_axis(pixels, num_patches(grids))
        if axis is None:
            return None
        return CallKind.of(args, kwargs, axis)

    def run_joined(self, calls: Sequence[TowerCall]) -> list[Any]:
        if all(call.args[1].shape[0] == 1 for call in calls):
            return self.each_once(calls, self.as_one)
        return self._shares(self.look(self._joined(calls), calls[0].kwargs), calls)

    def run_by_shape(self, calls: Sequence[TowerCall]) -> list[Any]:
        pictures = [self._pictures(call) for call in calls]
        every = list(chain(*pictures))
        found = iter(self.each_once(every, self._by_shapes))
        answers = []
        for call, several in zip(calls, pictures, strict=True):
            alone = list(islice(found, len(several)))
            if len(alone) == 1:
                answers += alone
            elif all(array.ndim == 2 for array in arrays_of(alone)):
                answers.append(join_rows(alone))
            else:  # the output's rows are not in proportion to patches
                answers.append(RememberingTower.look(self, call.args, call.kwargs))
        return answers

    def _by_shapes(self, calls: Sequence[TowerCall]) -> list[Any]:
        shapes: dict[tuple[Any, ...], list[int]] = {}
        for at, call in enumerate(calls):
            shapes.setdefault(call.shape, []).append(at)
        found: list[Any] = [None] * len(calls)
        pictures = current().pictures
        for indices in shapes.values():
            count = 1 if pictures is None else pictures(calls[indices[0]])
            for start in range(0, len(indices), count):
                part = indices[start : start + count]
                answers = self.as_one([calls[at] for at in part], count)
                for at, answer in zip(part, answers, strict=True):
                    found[at] = answer
        return found

    def as_one(self, calls: Sequence[TowerCall], count: int = 1) -> list[Any]:
        """Join one-picture calls, filled to ``count`` with repeats."""
        filled = [*calls, *[calls[0]] * (count - len(calls))]
        if len(filled) == 1:
            return [self.fresh(calls[0].args, calls[0].kwargs)]
        found = self.fresh(self._joined(filled), calls[0].kwargs)
        return self._shares(found, filled)[: len(calls)]

    def _pictures(self, call: TowerCall) -> list[TowerCall]:
        pixels, grids = call.args
        parts = split_patches(pixels, num_patches(grids)) or [pixels]
        if len(parts) == 1:
            return [call]
        return [
            TowerCall(self, (part, grids[at : at + 1]), call.kwargs, call.kind)
            for at, part in enumerate(parts)
        ]

    def _joined(self, calls: Sequence[TowerCall]) -> tuple[mx.array, mx.array]:
        axis = patch_axis(calls[0].args[0], num_patches(calls[0].args[1]))
        return (
            mx.concatenate([call.args[0] for call in calls], axis=axis),
            mx.concatenate([call.args[1] for call in calls]),
        )

    def _shares(self, found: Any, calls: Sequence[TowerCall]) -> list[Any]:
        counts = [sum(num_patches(call.args[1])) for call in calls]
        return self.taken_apart(split_rows(found, counts))

    def count_patches(self, call: TowerCall, patch: int) -> int:
        return sum(num_patches(call.args[1]))


def _has_one_picture(args: Sequence[Any]) -> bool:
    """Whether a call of a grid tower has one picture, or what no grid tower takes."""
    if len(args) != 2 or not isinstance(args[1], mx.array):
        return True
    return bool(args[1].shape[0] == 1)


def unshared(tower_class: type[RememberingTower], why: str) -> type[RememberingTower]:
    """Subclass a wrapper to keep requests apart, with the reason."""
    return type(tower_class.__name__, (tower_class,), {"why_apart": why})


def split_list(found: Any, counts: Sequence[int]) -> list[Any] | None:
    """Split a list of answers by calls; None if it is none, or of another length."""
    if type(found) is not list or len(found) != sum(counts):
        return None
    answers = iter(found)
    return [list(islice(answers, count)) for count in counts]


def num_patches(grids: mx.array) -> list[int]:
    """Count each picture's patches from grids (P, 2 or 3)."""
    found: list[int] = np.array(grids).prod(axis=1).tolist()
    return found


def patch_axis(pixels: mx.array, counts: Sequence[int]) -> int | None:
    """Return the patches' axis, 0 or 1; None if neither fits."""
    total = sum(counts)
    if pixels.shape[:1] == (total,):
        return 0
    return 1 if pixels.shape[:2] == (1, total) else None


def split_patches(pixels: mx.array, counts: Sequence[int]) -> list[mx.array] | None:
    """Split patches by picture; None if they do not fit."""
    axis = patch_axis(pixels, counts)
    if axis is None:
        return None
    if len(counts) == 1:
        return [pixels]  # the same object, whose digest may be known
    ends: list[int] = np.cumsum(counts)[:-1].tolist()
    return split_noted(pixels, ends, axis)


def evaluate_arrays(module: nn.Module) -> None:
    """Evaluate a tree's arrays: other threads cannot use unevaluated ones."""
    mx.eval(list(_arrays(module)))


def package_of(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def tables_on_disk(module: nn.Module) -> list[Any]:
    """Return modules that read rows from checkpoint files."""
    return [child for child in module.modules() if _is_on_disk(child)]


def _is_on_disk(node: Any) -> bool:
    # mlx-vlm's only such class is OffloadedEngramEmbedding
    return hasattr(type(node), "_read_rows")


def leave_on_disk(module: nn.Module) -> None:
    """Remove tables on disk from a tree; mlx-vlm adds them, unread, for conversions."""
    for table in tables_on_disk(module):
        for name in ("weight", "scales", "biases"):
            table.pop(name, None)
        table.__dict__.pop("_source_embedding", None)


def _arrays(module: nn.Module) -> Iterator[mx.array]:
    packages = {package_of(child) for _, child in module.named_modules()} | {"mlx_vlm"}
    leaves = (str, bytes, int, float, type)
    seen: dict[int, Any] = {}  # keeps objects alive, so that no id is reused

    def walk(node: Any) -> Iterator[mx.array]:
        if isinstance(node, mx.array):
            yield node
            return
        is_leaf = isinstance(node, leaves)
        if is_leaf or id(node) in seen or _is_on_disk(node):
            return
        seen[id(node)] = node
        children: list[Any] = []
        if isinstance(node, Mapping):  # modules too
            children.extend(node.values())
        elif isinstance(node, (list, tuple)):
            children.extend(node)
        if package_of(node) in packages:
            children.append(getattr(node, "__dict__", {}))
        for child in children:
            yield from walk(child)

    return walk(module)


def two_tables(parent: type) -> type:
    """Subclass an embedding of two tables to look both up; mlx-vlm joins them in every forward.

    ``parent`` has ``embedding`` (V, D), and ``new_embedding`` (W, D) for ids from V on.
    """

    class TwoTables(parent):  # type: ignore[misc]
        def __call__(self, ids: mx.array) -> mx.array:
            size = self.embedding.shape[0]
            is_new = ids >= size
            old = self.embedding[mx.where(is_new, 0, ids)]
            new = self.new_embedding[mx.where(is_new, ids - size, 0)]
            return mx.where(is_new[..., None], new, old)

    return TwoTables
