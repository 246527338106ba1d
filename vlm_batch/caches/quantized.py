"""Keys and values in few bits: which layers, by which scheme, and a row's own quantised cache.

One rule for a row alone and in any batch: every layer of full attention, the last one included, holds quantised keys and
values from token ``start`` on, and at that moment those of the tokens before it, too. All attention reads what is stored,
also within a chunk, so that an answer does not depend on where chunks end. Sliding windows, recurrent states and
cross-attention stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_vlm.models.cache import CacheList, KVCache, create_attention_mask
from mlx_vlm.turboquant import TurboQuantKVCache, _QuantizedStateProxy

from vlm_batch.caches.indexed import IndexedCache
from vlm_batch.caches.slab import SlabCache, grow, put_columns

#: What ``mx.quantize`` offers.
UNIFORM_BITS = (2, 3, 4, 5, 6, 8)
UNIFORM_GROUPS = (32, 64, 128)
#: What the codebooks of TurboQuant (arXiv:2504.19874) are made for here; halves give the values one bit more than the keys.
TURBO_BITS = (2, 8)
SCHEMES = ("uniform", "turboquant")
#: How much longer a head may become by filling its last group.
MAX_FILLED = 1.25
#: Columns by which a row's cache grows.
STEP = 256


@dataclass(frozen=True)
class KVQuantisation:
    """How keys and values are stored. Raises ValueError for what a scheme cannot do.

    ``uniform`` is ``mx.quantize``: groups of ``group_size`` numbers share a scale and a bias. ``turboquant`` rotates
    every key and value and codes it by a fixed codebook, through mlx-vlm's caches for one row.
    """

    bits: float
    group_size: int = 64
    scheme: str = "uniform"
    start: int = 0

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ValueError(f"kv_quant_scheme is {self.scheme!r}; it must be one of {', '.join(SCHEMES)}")
        if self.start < 0:
            raise ValueError(f"quantized_kv_start is {self.start}; it must be at least 0")
        if self.scheme == "turboquant":
            low, high = TURBO_BITS
            if not low <= self.bits <= high or self.bits * 2 != int(self.bits * 2):
                raise ValueError(f"kv_bits is {self.bits}; turboquant takes {low} to {high} bits, in steps of a half")
            return
        if self.bits not in UNIFORM_BITS:
            halves = "; 3.5 and other halves need kv_quant_scheme='turboquant'" if self.bits != int(self.bits) else ""
            raise ValueError(f"kv_bits is {self.bits}; uniform quantisation takes {UNIFORM_BITS}{halves}")
        if self.group_size not in UNIFORM_GROUPS:
            raise ValueError(f"kv_group_size is {self.group_size}; it must be one of {UNIFORM_GROUPS}")

    def caches(self, fresh: Sequence[Any]) -> list[Any]:
        """A row's caches with those of full attention replaced."""
        return [self._cache(cache) for cache in fresh]

    def counts(self, fresh: Sequence[Any]) -> tuple[int, int]:
        """(how many layers are quantised, how many there are)"""
        return sum(_has_full(cache) for cache in fresh), len(fresh)

    def check_shapes(self, fresh: Sequence[Any]) -> None:
        """Raise ValueError if groups do not fit the heads of caches that have seen tokens: too much would be filler."""
        for cache in fresh:
            for part in _parts(cache):
                if self.scheme == "uniform" and type(part) is KVCache and part.keys is not None:
                    for what, array in (("keys", part.keys), ("values", part.values)):
                        depth = int(array.shape[-1])
                        filled = depth + -depth % self.group_size
                        if filled > MAX_FILLED * depth:
                            raise ValueError(
                                f"the model's {what} have {depth} numbers a head: with kv_group_size={self.group_size} "
                                f"they would be stored as {filled}; take another of {UNIFORM_GROUPS} that fits, or "
                                "kv_quant_scheme='turboquant'"
                            )

    def _cache(self, cache: Any) -> Any:
        if type(cache) is CacheList:
            return CacheList(*(self._cache(part) for part in cache.caches))
        if type(cache) is IndexedCache:
            return IndexedCache(self._cache(cache.inner))
        if type(cache) is not KVCache:
            return cache
        if self.start:
            return LateCache(self)
        return self.empty()

    def empty(self) -> QuantizedCache | TurboCache:
        """A cache that quantises from its first token on."""
        if self.scheme == "turboquant":
            return TurboCache(bits=self.bits)
        return QuantizedCache(self.group_size, int(self.bits))


def settings_of(kv: KVQuantisation | None) -> dict[str, str]:
    """What a saved row must have in common with the batcher that continues it, by the options' names."""
    names = ("kv_bits", "kv_group_size", "kv_quant_scheme", "quantized_kv_start")
    values = ("None",) * 4 if kv is None else (f"{kv.bits:g}", str(kv.group_size), kv.scheme, str(kv.start))
    return dict(zip(names, values, strict=True))


def _has_full(cache: Any) -> bool:
    return any(type(part) is KVCache for part in _parts(cache))


def _parts(cache: Any) -> Sequence[Any]:
    """The caches that a layer's cache is made of, or itself."""
    if type(cache) is IndexedCache:
        return (cache.inner,)
    return cache.caches if type(cache) is CacheList else (cache,)


class Layout(NamedTuple):
    """How quantised numbers lie: ``depth`` of them a head, filled with zeros to whole groups."""

    group_size: int
    bits: int
    depth: int


class QuantizedStates(NamedTuple):
    """Keys or values (B, H, L, D), quantised: what a model gets instead of an array. The hook in attention reads it."""

    packed: mx.array  # (B, H, L, D * bits / 32) uint32
    scales: mx.array  # (B, H, L, D / group_size)
    biases: mx.array
    layout: Layout

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, L, D), for models that ask how many keys there are."""
        batch, heads, length, _ = self.scales.shape
        return (batch, heads, length, self.layout.depth)

    @property
    def parts(self) -> tuple[mx.array, mx.array, mx.array]:
        return (self.packed, self.scales, self.biases)

    def map(self, change: Any) -> QuantizedStates:
        """The same with every part changed."""
        return of_parts([change(part) for part in self.parts], self.layout)

    def dequantized(self) -> mx.array:
        """(B, H, L, D)"""
        packed, scales, biases = (mx.contiguous(part) for part in self.parts)
        group_size, bits, depth = self.layout
        return mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits)[..., :depth]


def of_parts(parts: Sequence[mx.array], layout: Layout) -> QuantizedStates:
    """States of packed numbers, scales and biases."""
    packed, scales, biases = parts
    return QuantizedStates(packed, scales, biases, layout)


def quantize(array: mx.array, group_size: int, bits: int) -> QuantizedStates:
    """(B, H, L, D), in groups along D, the last one filled with zeros."""
    layout = Layout(group_size, bits, array.shape[-1])
    return of_parts(mx.quantize(_filled(array, group_size), group_size=group_size, bits=bits), layout)


def _filled(array: mx.array, group_size: int) -> mx.array:
    missing = -array.shape[-1] % group_size
    return mx.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)]) if missing else array


class QuantizedCache:
    """One row's keys and values of one layer, quantised as they come: a ``KVCache`` whose states are tuples."""

    def __init__(self, group_size: int, bits: int) -> None:
        self.group_size = group_size
        self.bits = bits
        self.keys: QuantizedStates | None = None  # (1, H, capacity, D)
        self.values: QuantizedStates | None = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[QuantizedStates, QuantizedStates]:
        """Append (1, H, L, D) keys and values; all that there are, quantised."""
        end = self.offset + keys.shape[2]
        self.keys, self.values = (
            _append(held, quantize(new, self.group_size, self.bits), self.offset)
            for held, new in ((self.keys, keys), (self.values, values))
        )
        self.offset = end
        return self.state

    @property
    def state(self) -> tuple[QuantizedStates, QuantizedStates]:
        """What ``update_and_fetch`` last returned (layers that share another layer's KV read it)."""
        assert self.keys is not None and self.values is not None
        keys, values = (held.map(lambda part: part[:, :, : self.offset]) for held in (self.keys, self.values))
        return keys, values

    def make_mask(self, length: int, window_size: int | None = None, return_array: bool = False) -> Any:
        return create_attention_mask(length, self.offset, return_array=return_array, window_size=window_size)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for held in (self.keys, self.values) if held is not None for part in held.parts)


class LateCache:
    """One row's keys and values: exact until ``start`` tokens are there, quantised, all of them, from the next one on.

    Chunks end at ``start``, so that it is the tokens and not the chunks that decide.
    """

    def __init__(self, how: KVQuantisation, inner: Any = None) -> None:
        self.how = how
        self.inner = KVCache() if inner is None else inner

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        if type(self.inner) is KVCache and self.inner.offset >= self.how.start:
            exact, self.inner = self.inner, self.how.empty()
            if exact.offset:
                self.inner.update_and_fetch(*exact.state)
        return self.inner.update_and_fetch(keys, values)

    @property
    def offset(self) -> int:
        return int(self.inner.offset)

    @property
    def state(self) -> Any:
        return self.inner.state

    def make_mask(self, length: int, window_size: int | None = None, return_array: bool = False) -> Any:
        return self.inner.make_mask(length, window_size=window_size, return_array=return_array)

    @property
    def nbytes(self) -> int:
        return int(self.inner.nbytes)


class TurboStates(_QuantizedStateProxy):  # type: ignore[misc]
    """Coded keys or values that know the cache whose kernels read them, for layers that share another layer's."""

    __slots__ = ("cache",)

    def __init__(self, states: _QuantizedStateProxy, cache: TurboCache) -> None:
        super().__init__(states._state, states.shape[2], states.shape[1])
        self.cache = cache


class TurboCache(TurboQuantKVCache):  # type: ignore[misc]
    """mlx-vlm's cache of one row, coded by TurboQuant."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[TurboStates, TurboStates]:
        """Append (1, H, L, D) keys and values; all that there are, coded."""
        coded_keys, coded_values = super().update_and_fetch(keys, values)
        return TurboStates(coded_keys, self), TurboStates(coded_values, self)


def attend_quantized(
    queries: mx.array,
    keys: QuantizedStates,
    values: QuantizedStates,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of (B, H, L, D) queries over quantised keys and values.

    One query a row reads the packed numbers; several are worth unpacking them once for all. ``mask`` is None,
    "causal", or an array that broadcasts to (B, H, L, K): bool (True attends) or added to the scores.
    """
    batch, heads, length, _ = queries.shape
    if length > 1:
        plain = (states.dequantized() for states in (keys, values))
        return mx.fast.scaled_dot_product_attention(queries, *plain, scale=scale, mask=mask, sinks=sinks)
    groups = keys.shape[1]
    group_size, bits, _ = keys.layout
    product = partial(mx.quantized_matmul, group_size=group_size, bits=bits)
    grouped = _filled(queries * scale, group_size).reshape(
        batch, groups, heads // groups, -1
    )  # the heads of a group as its rows
    scores = product(grouped, *keys.parts, transpose=True)  # (B, G, H / G, K)
    if isinstance(mask, mx.array):  # "causal" hides nothing from the last query
        by_group = _by_group(mask, groups, heads)
        scores = mx.where(by_group, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + by_group
    if sinks is not None:
        column = mx.broadcast_to(sinks.reshape(1, groups, heads // groups, 1), (*scores.shape[:3], 1))
        scores = mx.concatenate([scores, column.astype(scores.dtype)], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    if sinks is not None:
        weights = weights[..., :-1]
    output = product(weights, *values.parts, transpose=False)  # (B, G, H / G, D_v)
    return output[..., : values.layout.depth].reshape(batch, heads, 1, -1)


def _by_group(mask: mx.array, groups: int, heads: int) -> mx.array:
    """A mask that broadcasts to (B, H, 1, K), for scores (B, G, H / G, K)."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if mask.shape[1] == 1:
        return mask
    return mask.reshape(mask.shape[0], groups, heads // groups, mask.shape[3])


def _append(held: QuantizedStates | None, new: QuantizedStates, at: int) -> QuantizedStates:
    """``new`` written behind the first ``at`` columns, which grow if there is no room."""
    end = at + new.shape[2]
    if held is None or end > held.packed.shape[2]:
        capacity = -(-end // STEP) * STEP
        old = (None,) * 3 if held is None else held.parts
        grown = [_grown(part, like, at, capacity) for part, like in zip(old, new.parts, strict=True)]
        held = of_parts(grown, new.layout)
    for part, piece in zip(held.parts, new.parts, strict=True):
        part[:, :, at:end] = piece
    return held


def _grown(part: mx.array | None, like: mx.array, at: int, capacity: int) -> mx.array:
    grown = mx.zeros((*like.shape[:2], capacity, like.shape[3]), like.dtype)
    if part is not None:
        grown[:, :, :at] = part[:, :, :at]
    return grown


class QuantizedSlabCache(SlabCache):
    """A layer of full attention as quantised slabs: packed numbers, scales and biases, each (S, H, C, ...)."""

    keys: Any  # the parts of QuantizedStates, or None
    values: Any

    def __init__(self, num_places: int, group_size: int, bits: int) -> None:
        super().__init__(num_places)
        self.group_size = group_size
        self.bits = bits
        self.layouts: list[Layout] = []  # of keys and of values

    def put(self, place: int, cache: QuantizedCache) -> None:
        """Copy one row's packed keys and values (its own bytes only) into a place."""
        length = cache.offset
        self.layouts = [states.layout for states in cache.state]
        rows = [states.parts for states in cache.state]
        self._reserve_parts(rows, length + 1)
        for slabs, parts in zip((self.keys, self.values), rows, strict=True):
            for slab, part in zip(slabs, parts, strict=True):
                slab[place : place + 1, :, :length] = part
        self._lengths[place] = length

    def take(self, place: int) -> Any:
        """The row at a place as a single-row cache with arrays of its own, not evaluated yet."""
        cache = QuantizedCache(self.group_size, self.bits)
        cache.offset = self._lengths[place]
        cache.keys, cache.values = (
            of_parts([self._row(slab, place, 0, cache.offset) for slab in slabs], layout)
            for slabs, layout in zip((self.keys, self.values), self.layouts, strict=True)
        )
        return cache

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Append (S, H, 1, D) keys and values at each place's own length; all up to the widest row, quantised."""
        at = self._pad(self._positions()[:, None, None, None])
        new = [quantize(self._pad(array), self.group_size, self.bits).parts for array in (keys, values)]
        self._reserve_parts(new, self._idx + 1)
        self.keys, self.values = (
            tuple(put_columns(slab, at, part) for slab, part in zip(slabs, parts, strict=True))
            for slabs, parts in zip((self.keys, self.values), new, strict=True)
        )
        self.advance()
        if self._traced is not None:
            self._traced = self._traced + 1
        return self._fetched()

    def prepare(self) -> tuple[Any, ...]:
        """Make room for one more token; what a step's graph depends on."""
        self._reserve_parts([self.keys, self.values], self._idx + 1)
        shapes = tuple(part.shape for slabs in (self.keys, self.values) for part in slabs)
        return (shapes, self.keys[1].dtype, self._live, self._width(self._idx + 1))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.arrays())

    def arrays(self) -> list[mx.array]:
        return [part for slabs in (self.keys, self.values) if slabs is not None for part in slabs]

    def _fetched(self) -> Any:
        width = self._width(self._idx)
        return tuple(
            of_parts([slab[: self._live, :, :width] for slab in slabs], layout)
            for slabs, layout in zip((self.keys, self.values), self.layouts, strict=True)
        )

    def _reserve_parts(self, like: Sequence[Sequence[mx.array]], tokens: int) -> None:
        """Make room for ``tokens`` columns, of heads and depths as in ``like``."""
        current = 0 if self.keys is None else int(self.keys[0].shape[2])
        if tokens <= current:
            return
        capacity = self._capacity(tokens, current)
        grown = []
        for slabs, parts in zip((self.keys, self.values), like, strict=True):
            shapes = [(self.num_places, part.shape[1], capacity, part.shape[3]) for part in parts]
            old = slabs or (None,) * len(shapes)
            grown.append(tuple(grow(o, shape, p.dtype) for o, shape, p in zip(old, shapes, parts, strict=True)))
        self.keys, self.values = grown
