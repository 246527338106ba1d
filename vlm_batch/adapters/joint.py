"""Pictures of several requests in one call of a tower, for any family.

Nothing of a family's code knows of it. A request's encoding runs until it calls a tower, and is left there: ``Awaited`` carries
the call out. Calls of several requests that fit each other are made as one, and each request's share is put down for it
(``Answers``). When its encoding then runs, the tower hands out what lies there; what does not is looked at alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from vlm_batch.arrays import arrays_of, map_arrays


class Tower(Protocol):
    """A vision tower that can make calls of several requests as one (``vlm_batch.adapters.modules``)."""

    def look(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...
    def kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kind | None: ...
    def together(self, calls: Sequence[TowerCall]) -> list[Any]: ...
    def apart(self, calls: Sequence[TowerCall]) -> list[Any]: ...
    def count_patches(self, call: TowerCall, patch: int) -> int: ...


class Kind(NamedTuple):
    """The facts that calls of a tower have in common which can be made as one."""

    settings: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], axis: int = 0) -> Kind:
        """A call's, whose first array is joined with others along ``axis`` and whose other arrays along their first. Settings
        are all that is no array."""
        tree = _tree(args, kwargs)
        arrays = arrays_of(tree)
        settings = repr(map_arrays(tree, lambda one: "array" if isinstance(one, mx.array) else one.tolist()))
        shapes = (arrays[0].shape[axis + 1 :], *(array.shape[1:] for array in arrays[1:]))
        return cls(settings, shapes, tuple(str(array.dtype) for array in arrays))


@dataclass(frozen=True, eq=False)
class TowerCall:
    """A call that a request's encoding has come to."""

    tower: Tower
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    kind: Kind

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that the tower is given, in an order that calls of one kind have in common."""
        return arrays_of(_tree(self.args, self.kwargs))

    @property
    def shape(self) -> tuple[Any, ...]:
        """Everything in a call but the pictures' own values: shapes, and the values of whole numbers, which are sizes."""
        whole = (mx.int32, mx.int64, mx.uint32, mx.uint64)
        arrays = [(one.shape, one.tolist() if one.dtype in whole else None) for one in self.arrays]
        return (self.kind.settings, self.kind.dtypes, str(arrays))


class Awaited(BaseException):
    """Leaves an encoding at a call of a tower. Nothing but ``advance`` is to catch it.

    The code that calls the tower is mlx-vlm's: a plain function, which cannot be suspended where it waits, and what it hands
    its tower is known only once it has run to there. A thread for each request would wait, but MLX's arrays belong to the
    thread that made them. So the code is left by an exception, which no ``except Exception`` of its own takes for an error,
    and runs again with the answer; what it did before the tower is not evaluated.
    """

    def __init__(self, call: TowerCall) -> None:
        super().__init__()
        self.call = call


@dataclass
class Answers:
    """The answers of towers to one request's calls, in their order. While it ``awaits``, a call without an answer leaves.

    ``result`` is the whole encoding's, once all of its calls have answers.
    """

    found: list[Any] = field(default_factory=list)
    place: int = 0
    awaits: bool = False
    result: Any = None

    @property
    def is_any(self) -> bool:
        """Whether there is anything to hand out."""
        return bool(self.found) or self.result is not None

    def next(self, tower: Tower, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The answer to the next call. Raises Awaited."""
        self.place += 1
        if self.place <= len(self.found):
            return map_arrays(self.found[self.place - 1], _handle)
        if not self.awaits:
            return tower.look(args, kwargs)
        kind = tower.kind(args, kwargs)
        if kind is None:
            return self._put(tower.look(args, kwargs))
        raise Awaited(TowerCall(tower, tuple(args), kwargs, kind))

    def _put(self, found: Any) -> Any:
        self.found.append(found)
        return map_arrays(found, _handle)


class Looked(dict[str, Any]):
    """A request's inputs, with answers of towers to its first calls."""

    def __init__(self, inputs: Mapping[str, Any], answers: Answers) -> None:
        super().__init__(inputs)
        self.answers = answers


def advance(answers: Answers, encode: Callable[[Answers], Any]) -> TowerCall | None:
    """Run a request's encoding to its first call without an answer, or to its end. What is wrong with a request is said when
    it is encoded by itself."""
    answers.place, answers.awaits = 0, True
    try:
        answers.result = encode(answers)
    except Awaited as awaited:
        return awaited.call
    except Exception:
        return None
    finally:
        answers.awaits = False
    return None


def make_calls(calls: Mapping[int, TowerCall], *, by_shapes: bool = False) -> dict[int, Any]:
    """The answers to calls, those of one tower and kind made as one. Calls that fail together have none: each is made anew
    when its request is encoded by itself, and raises what is wrong with it. ``by_shapes``: pictures share calls of the shapes
    in which each of them always is; the others have no answers here."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for at, call in calls.items():
        groups.setdefault((id(call.tower), call.kind), []).append(at)
    found: dict[int, Any] = {}
    for places in groups.values():
        given = [calls[at] for at in places]
        try:
            tower = given[0].tower
            made = tower.apart(given) if by_shapes else tower.together(given)
            mx.async_eval(*arrays_of(made))
        except Exception:
            continue
        found.update((at, answer) for at, answer in zip(places, made, strict=True) if answer is not None)
    return found


def join_calls(calls: Sequence[TowerCall]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of calls of one kind as those of one: arrays joined along their first axis."""
    rest = zip(*(call.arrays for call in calls), strict=True)

    def joined(array: Any) -> Any:
        return mx.concatenate(list(next(rest))) if isinstance(array, mx.array) else array

    args, kwargs = map_arrays(_tree(calls[0].args, calls[0].kwargs), joined)
    return args, kwargs


def _tree(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    return [list(args), dict(sorted(kwargs.items()))]


def _handle(array: Any) -> Any:
    """The same values in an array object of its own: an ``x += 1`` changes the object."""
    return array[...]
