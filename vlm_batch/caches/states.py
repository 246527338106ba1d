"""One layer of a row as an immutable state that shares nothing with a live row, and caches made of it again.

A state is *whole* if a cache can be made of any number of its first tokens (full attention). All others (sliding
windows, recurrent states) are good for the length at which they were taken. Each kind's state lies beside its cache.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx

from vlm_batch.arrays import arrays_of, own_array

#: The states that a file can hold, by the names of their classes.
FILED_STATES: dict[str, type] = {}

State = TypeVar("State", bound=type)


class LayerState:
    """One layer of one row: a frozen dataclass of arrays, numbers, and tuples and states of those."""

    #: Whether it can be cut back to any length.
    is_whole = False
    #: The least length that it can be cut back to.
    floor = 0

    def reaches(self, length: int) -> bool:
        """Whether a cache of the first ``length`` tokens can be made of it."""
        raise NotImplementedError

    def restore(self, length: int) -> Any:
        """A fresh single-row cache of its first ``length`` tokens."""
        raise NotImplementedError

    def of_pictures(self, share: float) -> LayerState:
        """The state of the row's first pictures alone, which take ``share`` of all their positions."""
        return self

    def parts(self) -> list[LayerState]:
        """The states that it is made of."""
        values = [part for value in vars(self).values() for part in (value if isinstance(value, tuple) else (value,))]
        return [part for part in values if isinstance(part, LayerState)]

    def arrays(self) -> list[mx.array]:
        """Every array of it and of its parts."""
        return [*arrays_of(vars(self)), *(array for part in self.parts() for array in part.arrays())]


def filed(state: State) -> State:
    """Let files hold a state.

    Its name and its fields are the format of the file: to change one of them is to change ``files.VERSION``.
    """
    FILED_STATES[state.__name__] = state
    return state


def can_file(state: LayerState) -> bool:
    """Whether a file can hold a state and all of its parts."""
    return FILED_STATES.get(type(state).__name__) is type(state) and all(map(can_file, state.parts()))


@dataclass(frozen=True)
class CopiedState(LayerState):
    """A single-row cache of an unknown kind, copied attribute by attribute: good for one length only."""

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
    """A layer that no row can continue: it has dropped tokens that a longer prompt would see."""

    def reaches(self, length: int) -> bool:
        return False


def is_cache(value: Any) -> bool:
    """Whether something is one of mlx-vlm's caches, or of a kind that inherits from ours, wherever that is defined."""
    modules = (base.__module__ for base in type(value).__mro__)
    return type(value).__module__.startswith("mlx_vlm.") or any(
        name.startswith("vlm_batch.caches.") for name in modules
    )


def _copy(value: Any, copied: list[mx.array]) -> Any:
    """A copy of a cache whose arrays, containers and inner caches are its own; the new arrays go into ``copied``."""
    if isinstance(value, mx.array):
        copied.append(own_array(value))
        return copied[-1]
    if isinstance(value, tuple) and type(value) is not tuple:  # named
        return type(value)(*(_copy(item, copied) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item, copied) for item in value)
    if isinstance(value, dict):
        return {name: _copy(item, copied) for name, item in value.items()}
    if is_cache(value):
        twin = copy.copy(value)
        twin.__dict__.update({name: _copy(item, copied) for name, item in vars(value).items()})
        return twin
    return value
