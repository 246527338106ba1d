"""Immutable states of a row's layers.

A *whole* state can be cut to any length, as full attention can. Others hold for their saved length.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx

from vlm_batch.arrays import arrays_of, own_array

#: Classes of states that files can hold, by name.
FILED_STATES: dict[str, type] = {}

State = TypeVar("State", bound=type)


class LayerState:
    """One layer of one row: a frozen dataclass of arrays, numbers, tuples and states."""

    @property
    def is_whole(self) -> bool:
        """Whether it can be cut to any length."""
        return False

    @property
    def floor(self) -> int:
        """The least length that it can be cut to."""
        return 0

    def reaches(self, length: int) -> bool:
        """Whether it can restore the first ``length`` tokens."""
        raise NotImplementedError

    def restore(self, length: int) -> Any:
        """Make a single-row cache of the first ``length`` tokens."""
        raise NotImplementedError

    def of_pictures(self, share: float) -> LayerState:
        """Return the first pictures' state, with ``share`` of all picture positions."""
        return self

    def parts(self) -> list[LayerState]:
        """Return the states in it."""
        values: list[Any] = []
        for value in vars(self).values():
            values += value if isinstance(value, tuple) else (value,)
        return [value for value in values if isinstance(value, LayerState)]

    def arrays(self) -> list[mx.array]:
        """Return its arrays and those of its parts."""
        found = arrays_of(vars(self))
        for part in self.parts():
            found += part.arrays()
        return found


def filed(state: State) -> State:
    """Let files hold a class of states.

    Its name and fields are the file format: a change needs a new ``files.VERSION``.
    """
    FILED_STATES[state.__name__] = state
    return state


def can_file(state: LayerState) -> bool:
    """Whether files can hold a state and its parts."""
    if FILED_STATES.get(type(state).__name__) is not type(state):
        return False
    return all(map(can_file, state.parts()))


@dataclass(frozen=True)
class CopiedState(LayerState):
    """A copy of an unknown cache, for one length only."""

    cache: Any
    length: int
    copied: tuple[mx.array, ...]

    @classmethod
    def of(cls, cache: Any, length: int) -> CopiedState:
        copied: list[mx.array] = []
        return cls(_copy(cache, copied), length, tuple(copied))

    def reaches(self, length: int) -> bool:
        return length == self.length

    def restore(self, length: int) -> Any:
        return _copy(self.cache, [])


@dataclass(frozen=True)
class LostState(LayerState):
    """A layer that dropped tokens: nothing can continue it."""

    def reaches(self, length: int) -> bool:
        return False


def is_cache(value: Any) -> bool:
    """Whether a value is of a class of mlx-vlm's, or inherits one of ours."""
    if type(value).__module__.startswith("mlx_vlm."):
        return True
    modules = [base.__module__ for base in type(value).__mro__]
    return any(name.startswith("vlm_batch.caches.") for name in modules)


def _copy(value: Any, copied: list[mx.array]) -> Any:
    """Copy a cache deeply; its new arrays go into ``copied``."""
    if isinstance(value, mx.array):
        copied.append(own_array(value))
        return copied[-1]
    if isinstance(value, (list, tuple)):
        items = [_copy(item, copied) for item in value]
        if isinstance(value, list) or type(value) is tuple:
            return type(value)(items)
        return type(value)(*items)  # a named tuple
    if isinstance(value, dict):
        return {name: _copy(item, copied) for name, item in value.items()}
    if is_cache(value):
        twin = copy.copy(value)
        twin.__dict__.update(_copy(vars(value), copied))
        return twin
    return value
