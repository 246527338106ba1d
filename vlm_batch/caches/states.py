"""One layer of a row as an immutable state that shares nothing with a live row, and caches made of it again.

A state is *whole* if a cache can be made of any number of its first tokens (full attention). All others (sliding
windows, recurrent states) are good for the length at which they were taken.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache
from mlx_vlm.turboquant import TurboQuantMSEState

from vlm_batch.caches.blocks import BlockCache
from vlm_batch.caches.cross import CrossCache
from vlm_batch.caches.indexed import IndexedCache
from vlm_batch.caches.pooled import PoolCache
from vlm_batch.caches.quantized import KVQuantisation, LateCache, Layout, QuantizedCache, TurboCache, of_parts
from vlm_batch.caches.retained import RetainedPromptCache
from vlm_batch.caches.whole import WholeCache


class LayerState(Protocol):
    """One layer of one row. ``restore(length)`` makes a fresh single-row cache of its first ``length`` tokens."""

    @property
    def is_whole(self) -> bool: ...
    @property
    def floor(self) -> int: ...
    def reaches(self, length: int) -> bool: ...
    def restore(self, length: int) -> Any: ...
    def parts(self) -> tuple[LayerState, ...]: ...
    def arrays(self) -> list[mx.array]: ...


@runtime_checkable
class SavesItself(Protocol):
    """A family's own single-row cache, which can be cut back to any length (adapters inherit from it)."""

    def saved(self) -> LayerState:
        """What it holds, to be restored."""
        ...


class _OnePart:
    """A state that is not made of others, and can be cut back to any length if it is whole."""

    floor = 0

    def parts(self) -> tuple[LayerState, ...]:
        return ()


@dataclass(frozen=True)
class FullState(_OnePart):
    """Full attention: keys (1, H, L, D) and values (1, H, L, D_v)."""

    keys: mx.array
    values: mx.array
    is_whole = True

    @classmethod
    def of(cls, cache: KVCache) -> FullState:
        return cls(*(own_array(part[:, :, : cache.offset]) for part in (cache.keys, cache.values)))

    def reaches(self, length: int) -> bool:
        return length <= int(self.keys.shape[2])

    def restore(self, length: int) -> KVCache:
        cache = KVCache()
        cache.keys, cache.values, cache.offset = self.keys[:, :, :length], self.values[:, :, :length], length
        return cache

    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]


@dataclass(frozen=True)
class WindowState(_OnePart):
    """A sliding window: the last tokens in their order, of ``length`` seen. Once it has rolled it cannot be cut."""

    keys: mx.array  # (1, H, min(length, window), D)
    values: mx.array
    length: int
    window: int
    keep: int
    is_whole = False

    @classmethod
    def of(cls, cache: RotatingKVCache) -> WindowState:
        ordered = [cache._temporal_order(part) for part in (cache.keys, cache.values)]
        if cache.keep == 0:  # a chunk leaves more behind than the next token can see
            ordered = [part[:, :, -min(cache.offset, cache.max_size) :] for part in ordered]
        keys, values = (own_array(part) for part in ordered)
        return cls(keys, values, cache.offset, cache.max_size, cache.keep)

    def reaches(self, length: int) -> bool:
        return length == self.length or (length <= self.length <= int(self.keys.shape[2]))

    def restore(self, length: int) -> RotatingKVCache:
        cache = RotatingKVCache(self.window, self.keep)
        kept = int(self.keys.shape[2]) - (self.length - length)
        cache.keys, cache.values = self.keys[:, :, :kept], self.values[:, :, :kept]
        cache.offset, cache._idx = length, kept
        return cache

    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]


@dataclass(frozen=True)
class RecurrentState(_OnePart):
    """States of fixed size (state-space models, linear attention, short convolutions): good for one length only."""

    slots: tuple[mx.array | None, ...]
    length: int
    is_whole = False

    @classmethod
    def of(cls, cache: ArraysCache, length: int) -> RecurrentState:
        return cls(tuple(None if slot is None else own_array(slot) for slot in cache.cache), length)

    def reaches(self, length: int) -> bool:
        return length == self.length

    def restore(self, length: int) -> ArraysCache:
        cache = ArraysCache(len(self.slots))
        cache.cache = [None if slot is None else slot[:] for slot in self.slots]
        return cache

    def arrays(self) -> list[mx.array]:
        return [slot for slot in self.slots if slot is not None]


@dataclass(frozen=True)
class CrossState(_OnePart):
    """Cross-attention: keys and values (1, H, T, D) of pictures that take equal shares of T. It has no tokens to cut."""

    keys: mx.array | None
    values: mx.array | None
    is_whole = True

    @classmethod
    def of(cls, cache: CrossCache) -> CrossState:
        return cls(*(None if part is None else own_array(part) for part in cache.state))

    def reaches(self, length: int) -> bool:
        return True

    def restore(self, length: int) -> CrossCache:
        return self.of_pictures(1.0)

    def of_pictures(self, share: float) -> CrossCache:
        """A cache of the first pictures, which take ``share`` of all positions."""
        cache = CrossCache()
        if self.keys is not None and self.values is not None and share > 0:
            kept = round(int(self.keys.shape[2]) * share)
            cache.hold(self.keys[:, :, :kept], self.values[:, :, :kept])
        return cache

    def arrays(self) -> list[mx.array]:
        return [part for part in (self.keys, self.values) if part is not None]


@dataclass(frozen=True)
class ListState:
    """A layer with several caches at once."""

    states: tuple[LayerState, ...]

    @property
    def is_whole(self) -> bool:
        return all(state.is_whole for state in self.states)

    @property
    def floor(self) -> int:
        return max((state.floor for state in self.states), default=0)

    def reaches(self, length: int) -> bool:
        return all(state.reaches(length) for state in self.states)

    def restore(self, length: int) -> CacheList:
        return CacheList(*(state.restore(length) for state in self.states))

    def parts(self) -> tuple[LayerState, ...]:
        return self.states

    def arrays(self) -> list[mx.array]:
        return [array for state in self.states for array in state.arrays()]


@dataclass(frozen=True)
class WholeState(ListState):
    """A layer with several caches that no batch takes apart."""

    @classmethod
    def of(cls, cache: WholeCache, length: int) -> LayerState:
        """A copy, if it has parts of other kinds than these."""
        if all(type(part) in _SAVERS for part in cache.caches):
            return cls(tuple(save_layer(part, length) for part in cache.caches))
        return CopiedState.of(cache, length)

    def restore(self, length: int) -> WholeCache:
        return WholeCache(*super().restore(length).caches)


@dataclass(frozen=True)
class PoolState(_OnePart):
    """Pooled keys, and the tokens that the next will be made of: good for one length only."""

    pooled: mx.array | None
    rest: tuple[mx.array, ...]
    before: tuple[mx.array, ...]
    ratio: int
    overlaps: bool
    length: int
    is_whole = False

    @classmethod
    def of(cls, cache: PoolCache, length: int) -> PoolState:
        pooled = None if cache.pooled is None else own_array(cache.pooled)
        rest, before = (tuple(map(own_array, part)) for part in (cache.rest, cache.before))
        return cls(pooled, rest, before, cache.ratio, cache.overlaps, length)

    def reaches(self, length: int) -> bool:
        return length == self.length

    def restore(self, length: int) -> PoolCache:
        cache = PoolCache(self.ratio, overlaps=self.overlaps)
        cache.pooled, cache.rest, cache.before = self.pooled, self.rest, self.before
        return cache

    def arrays(self) -> list[mx.array]:
        return [*(() if self.pooled is None else (self.pooled,)), *self.rest, *self.before]


@dataclass(frozen=True)
class QuantizedState(_OnePart):
    """Full attention in few bits: packed numbers, scales and biases (1, H, L, ...) of keys and of values."""

    keys: tuple[mx.array, ...]
    values: tuple[mx.array, ...]
    group_size: int
    bits: int
    depths: tuple[int, int]  # of a head's keys and values
    is_whole = True

    @classmethod
    def of(cls, cache: QuantizedCache) -> QuantizedState:
        keys, values = (tuple(own_array(part) for part in states.parts) for states in cache.state)
        depths = tuple(states.layout.depth for states in cache.state)
        return cls(keys, values, cache.group_size, cache.bits, (depths[0], depths[1]))

    def reaches(self, length: int) -> bool:
        return length <= int(self.keys[0].shape[2])

    def restore(self, length: int) -> QuantizedCache:
        cache = QuantizedCache(self.group_size, self.bits)
        cache.keys, cache.values = (
            of_parts([part[:, :, :length] for part in parts], Layout(self.group_size, self.bits, depth))
            for parts, depth in zip((self.keys, self.values), self.depths, strict=True)
        )
        cache.offset = length
        return cache

    def arrays(self) -> list[mx.array]:
        return [*self.keys, *self.values]


@dataclass(frozen=True)
class TurboState(_OnePart):
    """Full attention coded by mlx-vlm's TurboQuant: norms (1, H, L) and codes (1, H, L, W) of keys and of values."""

    keys: tuple[mx.array, ...]
    values: tuple[mx.array, ...]
    bits: float
    seed: int
    is_whole = True

    @classmethod
    def of(cls, cache: TurboCache) -> TurboState:
        keys, values = (
            tuple(own_array(part[:, :, : cache.offset]) for part in state) for state in (cache.keys, cache.values)
        )
        return cls(keys, values, cache.bits, cache.seed)

    def reaches(self, length: int) -> bool:
        return length <= int(self.keys[0].shape[2])

    def restore(self, length: int) -> TurboCache:
        cache = TurboCache(bits=self.bits, seed=self.seed)
        cache.keys, cache.values = (
            TurboQuantMSEState(*(part[:, :, :length] for part in parts)) for parts in (self.keys, self.values)
        )
        cache.offset = length
        return cache

    def arrays(self) -> list[mx.array]:
        return [*self.keys, *self.values]


@dataclass(frozen=True)
class LateState:
    """Full attention that is quantised from token ``start`` on: once it is, it cannot be cut back to before that."""

    state: LayerState
    how: tuple[float, int, str, int]
    is_whole = True

    @classmethod
    def of(cls, cache: LateCache, length: int) -> LateState:
        how = cache.how
        return cls(save_layer(cache.inner, length), (how.bits, how.group_size, how.scheme, how.start))

    @property
    def floor(self) -> int:
        return 0 if isinstance(self.state, FullState) else self.how[3]

    def reaches(self, length: int) -> bool:
        return self.state.reaches(length) and length >= self.floor

    def restore(self, length: int) -> LateCache:
        return LateCache(KVQuantisation(*self.how), self.state.restore(length))

    def parts(self) -> tuple[LayerState, ...]:
        return (self.state,)

    def arrays(self) -> list[mx.array]:
        return self.state.arrays()


@dataclass(frozen=True)
class IndexedState:
    """Keys and values beside an indexer's keys (1, L, D) and positions (3, 1, L); blocks are made of those again."""

    state: LayerState
    index_keys: mx.array
    positions: mx.array

    @classmethod
    def of(cls, cache: IndexedCache, length: int) -> IndexedState:
        return cls(save_layer(cache.inner, length), *(own_array(part) for part in cache.index))

    @property
    def is_whole(self) -> bool:
        return self.state.is_whole

    @property
    def floor(self) -> int:
        return self.state.floor

    def reaches(self, length: int) -> bool:
        return self.state.reaches(length)

    def restore(self, length: int) -> IndexedCache:
        inner = self.state.restore(length)
        return IndexedCache.of(inner, self.index_keys[:, :length], self.positions[..., :length])

    def parts(self) -> tuple[LayerState, ...]:
        return (self.state,)

    def arrays(self) -> list[mx.array]:
        return [*self.state.arrays(), self.index_keys, self.positions]


@dataclass(frozen=True)
class BlockState(_OnePart):
    """Attention within blocks of ``block`` positions: keys and values from the last one's ``start`` on, of ``length`` seen."""

    keys: mx.array  # (1, H, length - start, D)
    values: mx.array
    length: int
    start: int
    block: int
    is_whole = False

    @classmethod
    def of(cls, cache: BlockCache) -> BlockState:
        keys, values = (own_array(part) for part in cache.state if part is not None)
        return cls(keys, values, cache.offset, cache.start_position, cache.chunk_size)

    def reaches(self, length: int) -> bool:
        return self.start < length <= self.length

    def restore(self, length: int) -> BlockCache:
        cache, kept = BlockCache(self.block), length - self.start
        cache.keys, cache.values = self.keys[:, :, :kept], self.values[:, :, :kept]
        cache.offset, cache.start_position = length, self.start
        return cache

    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]


@dataclass(frozen=True)
class RetainedState(_OnePart):
    """A prompt whose answer will see all of it and its own last tokens, as it was before the answer began."""

    keys: mx.array  # (1, H, L, D)
    values: mx.array
    window: int
    is_whole = False

    @classmethod
    def of(cls, cache: RetainedPromptCache) -> LayerState:
        """Once the prompt has ended, the answer's tokens push each other out."""
        if cache.prompt is not None:
            return LostState()
        keys, values = (own_array(part) for part in cache.state if part is not None)
        return cls(keys, values, cache.window)

    def reaches(self, length: int) -> bool:
        return length <= int(self.keys.shape[2])

    def restore(self, length: int) -> RetainedPromptCache:
        cache = RetainedPromptCache(self.window)
        cache.keys, cache.values, cache.offset = self.keys[:, :, :length], self.values[:, :, :length], length
        return cache

    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]


@dataclass(frozen=True)
class CopiedState(_OnePart):
    """Any other kind of single-row cache, copied attribute by attribute: good for one length, and not for a file."""

    cache: Any
    length: int
    is_whole = False

    @classmethod
    def of(cls, cache: Any, length: int) -> CopiedState:
        return cls(_copy(cache), length)

    def reaches(self, length: int) -> bool:
        return length == self.length

    def restore(self, length: int) -> Any:
        return _copy(self.cache)

    def arrays(self) -> list[mx.array]:
        return _arrays(vars(self.cache))


@dataclass(frozen=True)
class LostState(_OnePart):
    """A layer that no row can go on from: what it dropped, a longer prompt would see."""

    is_whole = False

    def reaches(self, length: int) -> bool:
        return False

    def restore(self, length: int) -> Any:
        raise LookupError("nothing can be restored of this layer")

    def arrays(self) -> list[mx.array]:
        return []


#: How a kind of single-row cache at a length is saved; kinds that are not here are copied as they are.
_SAVERS: dict[type, Callable[[Any, int], LayerState]] = {
    KVCache: lambda cache, length: FullState.of(cache),
    RotatingKVCache: lambda cache, length: WindowState.of(cache),
    ArraysCache: RecurrentState.of,
    CrossCache: lambda cache, length: CrossState.of(cache),
    QuantizedCache: lambda cache, length: QuantizedState.of(cache),
    TurboCache: lambda cache, length: TurboState.of(cache),
    LateCache: LateState.of,
    IndexedCache: IndexedState.of,
    BlockCache: lambda cache, length: BlockState.of(cache),
    RetainedPromptCache: lambda cache, length: RetainedState.of(cache),
    PoolCache: PoolState.of,
    CacheList: lambda cache, length: ListState(tuple(save_layer(part, length) for part in cache.caches)),
    WholeCache: WholeState.of,
}


#: The kinds that a file can hold.
LAYER_STATES: tuple[type, ...] = (
    FullState,
    WindowState,
    RecurrentState,
    CrossState,
    ListState,
    WholeState,
    PoolState,
    QuantizedState,
    TurboState,
    LateState,
    IndexedState,
    BlockState,
    RetainedState,
)


def is_whole_kind(cache: Any) -> bool:
    """Whether a single-row cache can be cut back to any length."""
    if type(cache) is CacheList:
        return all(is_whole_kind(part) for part in cache.caches)
    if type(cache) is IndexedCache:
        return is_whole_kind(cache.inner)
    if isinstance(cache, SavesItself):
        return True
    return type(cache) in (KVCache, CrossCache, QuantizedCache, TurboCache, LateCache)


def save_layer(cache: Any, length: int) -> LayerState:
    """The state of a single-row cache that has seen ``length`` tokens. Its arrays are copies, not evaluated yet.

    Of a kind that is no cache of mlx-vlm's nothing can be restored.
    """
    if isinstance(cache, SavesItself):
        return cache.saved()
    saver = _SAVERS.get(type(cache))
    if saver is not None:
        return saver(cache, length)
    return CopiedState.of(cache, length) if _is_cache(cache) else LostState()


def own_array(array: mx.array) -> mx.array:
    """The same values in an array of their own: a slice would hold on to all of what it was cut from."""
    return mx.contiguous(array)


def _copy(value: Any) -> Any:
    """A copy of a cache whose arrays, containers and inner caches are its own."""
    if isinstance(value, mx.array):
        return own_array(value)
    if isinstance(value, tuple) and type(value) is not tuple:  # named
        return type(value)(*(_copy(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item) for item in value)
    if isinstance(value, dict):
        return {name: _copy(item) for name, item in value.items()}
    if _is_cache(value):
        twin = copy.copy(value)
        twin.__dict__.update({name: _copy(item) for name, item in vars(value).items()})
        return twin
    return value


def _is_cache(value: Any) -> bool:
    return type(value).__module__.startswith(("mlx_vlm.", "vlm_batch.caches."))


def _arrays(tree: Any) -> list[mx.array]:
    if isinstance(tree, mx.array):
        return [tree]
    if isinstance(tree, Mapping):
        return [array for item in tree.values() for array in _arrays(item)]
    if isinstance(tree, (list, tuple)):
        return [array for item in tree for array in _arrays(item)]
    if _is_cache(tree):
        return _arrays(vars(tree))
    return []
