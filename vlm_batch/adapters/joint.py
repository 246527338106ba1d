"""Joint tower calls for several requests' pictures.

A request is encoded up to its first tower call. Calls that fit are joined, and encoding starts over with their
``TowerOutputs``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from vlm_batch.adapters.hooks import running
from vlm_batch.adapters.known import concatenated
from vlm_batch.arrays import arrays_of, map_arrays
from vlm_batch.records import Call


class Tower(Protocol):
    def look(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...
    def kind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CallKind | None: ...
    def run_joined(self, calls: Sequence[TowerCall]) -> list[Any]: ...
    def run_by_shape(self, calls: Sequence[TowerCall]) -> list[Any]: ...
    def count_patches(self, call: TowerCall, patch: int) -> int: ...


class CallKind(NamedTuple):
    """The facts that joined calls share."""

    settings: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(
        cls, args: Sequence[Any], kwargs: Mapping[str, Any], axis: int = 0
    ) -> CallKind:
        """Return a call's kind; its first array is joined along ``axis``, others along their first."""
        tree = _tree(args, kwargs)
        arrays = arrays_of(tree)
        settings = repr(
            map_arrays(
                tree, lambda one: "array" if isinstance(one, mx.array) else one.tolist()
            )
        )
        shapes = (
            arrays[0].shape[axis + 1 :],
            *(array.shape[1:] for array in arrays[1:]),
        )
        return cls(settings, shapes, tuple(str(array.dtype) for array in arrays))


@dataclass(frozen=True, eq=False)
class TowerCall:
    tower: Tower
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    kind: CallKind

    @property
    def arrays(self) -> list[mx.array]:
        """The call's arrays, in an order common to its kind."""
        return arrays_of(_tree(self.args, self.kwargs))

    @property
    def shape(self) -> tuple[Any, ...]:
        """The call's settings, dtypes, shapes and integer values, which are sizes."""
        whole = (mx.int32, mx.int64, mx.uint32, mx.uint64)
        arrays = [
            (one.shape, one.tolist() if one.dtype in whole else None)
            for one in self.arrays
        ]
        return (self.kind.settings, self.kind.dtypes, str(arrays))


class PendingTowerCall(BaseException):
    """Leave an encoding at a tower call; only ``advance`` catches it.

    mlx-vlm's code cannot be suspended, and MLX arrays cannot change threads.
    """

    def __init__(self, call: TowerCall) -> None:
        super().__init__()
        self.call = call


@dataclass
class TowerOutputs:
    """A request's tower outputs in order.

    While ``awaits``, a call without an output raises ``PendingTowerCall``. ``result`` is the finished encoding.
    """

    found: list[Any] = field(default_factory=list)
    index: int = 0
    awaits: bool = False
    result: Any = None

    @property
    def is_any(self) -> bool:
        return bool(self.found) or self.result is not None

    def next(self, tower: Tower, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of the next call; may raise ``PendingTowerCall``."""
        self.index += 1
        if self.index <= len(self.found):
            return map_arrays(self.found[self.index - 1], _handle)
        if not self.awaits:
            return tower.look(args, kwargs)
        kind = tower.kind(args, kwargs)
        if kind is None:
            return self._put(tower.look(args, kwargs))
        raise PendingTowerCall(TowerCall(tower, tuple(args), kwargs, kind))

    def _put(self, found: Any) -> Any:
        self.found.append(found)
        return map_arrays(found, _handle)


class PrecomputedInputs(dict[str, Any]):
    """A request's inputs with the outputs of its first tower calls."""

    def __init__(self, inputs: Mapping[str, Any], outputs: TowerOutputs) -> None:
        super().__init__(inputs)
        self.outputs = outputs


def advance(
    outputs: TowerOutputs, encode: Callable[[TowerOutputs], Any]
) -> TowerCall | None:
    """Encode up to the first call without an output; errors are left to ``encode``."""
    outputs.index, outputs.awaits = 0, True
    try:
        outputs.result = encode(outputs)
    except PendingTowerCall as pending:
        return pending.call
    except Exception:
        return None
    finally:
        outputs.awaits = False
    return None


def make_calls(
    calls: Mapping[int, TowerCall], *, by_shapes: bool = False
) -> dict[int, Any]:
    """Run tower calls, joined by tower and kind; return outputs by request.

    Calls that fail together have none: each request raises its own error. With ``by_shapes``, only calls of fixed
    shapes are joined.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for at, call in calls.items():
        groups.setdefault((id(call.tower), call.kind), []).append(at)
    found: dict[int, Any] = {}
    for indices in groups.values():
        given = [calls[at] for at in indices]
        try:
            tower = given[0].tower
            made = tower.run_by_shape(given) if by_shapes else tower.run_joined(given)
            mx.async_eval(*arrays_of(made))
        except Exception:
            continue
        for at, answer in zip(indices, made, strict=True):
            if answer is not None:
                found[at] = answer
    return found


def outputs_together(
    requests: Sequence[Mapping[str, Any]],
    encode: Callable[[Mapping[str, Any], TowerOutputs], Any],
    shared: tuple[str, ...],
    call: Call,
    values_of_patch: int,
) -> dict[int, TowerOutputs]:
    """Make the tower calls of several requests together, up to ``call.most_patches`` patches.

    Args:
        encode: Encodes a request's inputs, with the outputs of its tower calls as far as they are there.
        shared: Prefixes of the inputs of media whose tower shares calls.
        values_of_patch: Numbers of a patch of a picture.

    Returns:
        Outputs by the requests' indices; none of requests without such media.
    """
    outputs: dict[int, TowerOutputs] = {}
    encoding: dict[int, Callable[[TowerOutputs], Any]] = {}
    for at, inputs in enumerate(requests):
        if any(name.startswith(shared) for name in inputs):
            outputs[at] = TowerOutputs()
            encoding[at] = partial(encode, inputs)

    calls: dict[int, TowerCall] = {}
    room = call.most_patches
    for at, theirs in outputs.items():
        asked = advance(theirs, encoding[at])
        if asked is None:
            continue
        room -= asked.tower.count_patches(asked, values_of_patch)
        if room < 0 and calls:
            break
        calls[at] = asked
    while len(calls) > 1:
        with running(call):
            found = make_calls(calls, by_shapes=call.is_fixed)
        calls = {}
        for at, output in found.items():
            outputs[at].found.append(output)
            asked = advance(outputs[at], encoding[at])
            if asked is not None:
                calls[at] = asked
    return outputs


def join_calls(calls: Sequence[TowerCall]) -> tuple[list[Any], dict[str, Any]]:
    rest = zip(*(call.arrays for call in calls), strict=True)

    def joined(array: Any) -> Any:
        return concatenated(list(next(rest))) if isinstance(array, mx.array) else array

    args, kwargs = map_arrays(_tree(calls[0].args, calls[0].kwargs), joined)
    return args, kwargs


def _tree(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    return [list(args), dict(sorted(kwargs.items()))]


def _handle(array: Any) -> Any:
    """Return a new array object: ``x += 1`` changes it."""
    return array[...]
