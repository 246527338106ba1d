"""Full attention coded by TurboQuant (arXiv:2504.19874)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_vlm.turboquant import DEFAULT_TURBOQUANT_SEED, resolve_kv_bits

from vlm_batch.arrays import own_array
from vlm_batch.caches import codebooks, lookups
from vlm_batch.caches.coded import CodedCache, CodedSlabCache, halves
from vlm_batch.caches.states import LayerState, filed
from vlm_batch.policy import KERNEL, UNPACKED
from vlm_batch.runtime.device import Device, device

#: Norms are stored in float16, as mlx-vlm does. A larger one would be infinite there.
MOST_NORM = 65504.0
#: A smaller vector is divided by this in its norm's place.
LEAST_NORM = 1e-6


#: Codes keys and values of one width: (layout, layout, keys, values) -> norms, and codes in one array or two; or None.
Coder = Callable[[Any, Any, mx.array, mx.array], "list[mx.array] | None"]


def cannot(*_: Any) -> None:
    """Leave it to operations."""


#: A kernel that codes, where there is one. Adapters set it.
code_by_kernel: Coder = cannot


class TurboLayout(NamedTuple):
    """The code of vectors of ``depth`` numbers."""

    bits: int
    depth: int
    seed: int

    @property
    def coding(self) -> tuple[int, int]:
        return (self.bits, self.depth)

    @property
    def width(self) -> int:
        """Words of 32 bits of a vector's codes."""
        return -(-self.depth * self.bits // 32)

    def of_width(self, width: int) -> TurboLayout:
        """Return the layout of codes of ``width`` words, of which the depth is not known: a multiple of eight."""
        depth = width * 32 // self.bits
        return self._replace(depth=depth // 8 * 8)

    @property
    def book(self) -> codebooks.Codebook:
        return codebooks.codebook(self.depth, self.bits)

    @property
    def turn(self) -> mx.array:
        """Signs (D,) before a Hadamard transform, or a rotation (D, D)."""
        return codebooks.rotation(self.depth, self.seed)

    def rotated(self, vectors: mx.array, scale: float = 1.0) -> mx.array:
        """Rotate (..., D) times ``scale``, in float32."""
        if self.turn.ndim == 1:
            signs = codebooks.scaled_signs(self.depth, self.seed, scale)
            return _turned(vectors, signs)
        return _turned(vectors.astype(mx.float32) * scale, self.turn)

    def restored(self, rotated: mx.array) -> mx.array:
        """Undo ``rotated``."""
        if self.turn.ndim == 1:
            return mx.hadamard_transform(rotated) * self.turn
        return rotated @ self.turn

    def code(self, vectors: mx.array) -> TurboStates:
        """Code (B, H, L, D)."""
        norms, units = _apart(vectors)
        return TurboStates(norms, self._packed(_turned(units, self.turn)), self)

    def code_with(
        self, other: TurboLayout, keys: mx.array, values: mx.array
    ) -> tuple[TurboStates, TurboStates]:
        """Code keys, and values by another layout: together where both have one width, in half as many operations."""
        parts = self.code_stacked(other, keys, values)
        own, others = halves(parts, self.num_stacked(other), keys.shape[1])
        return self.states(own), other.states(others)

    def num_stacked(self, other: TurboLayout) -> int:
        """All, if their rotations alone differ; norms alone, if vectors of one width are turned together."""
        if self.depth != other.depth or self.turn.ndim > 1:
            return 0
        return 2 if self.bits == other.bits else 1

    def code_stacked(
        self, other: TurboLayout, keys: mx.array, values: mx.array
    ) -> list[mx.array]:
        num_stacked, heads = self.num_stacked(other), keys.shape[1]
        if not num_stacked:
            return [*self.code(keys).parts, *other.code(values).parts]
        found = code_by_kernel(self, other, keys, values)
        if found is not None:
            return found
        norms, directions = self._directions(other, keys, values)
        if num_stacked > 1:
            return [norms, self._packed(directions)]
        own = self._packed(directions[:, :heads])
        return [norms, own, other._packed(directions[:, heads:])]

    def _directions(
        self, other: TurboLayout, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return norms (B, 2 H, L, 1), and rotated directions of keys and of values behind them."""
        seeds, heads = (self.seed, other.seed), (keys.shape[1], values.shape[1])
        signs = codebooks.both_signs(self.depth, seeds, heads)
        norms, units = _apart(mx.concatenate([keys, values], axis=1))
        return norms, _turned(units, signs)

    def _packed(self, directions: mx.array) -> mx.array:
        """Return the codes (..., W) of rotated directions (..., D)."""
        if lookups.is_numpys():
            found = lookups.packed(directions, *self.coding, self.width)
            if found is not None:
                return found
        codes = codebooks.codes_of(directions, self.book)
        return codebooks.pack(codes, self.bits, self.width)

    def states(self, parts: Sequence[mx.array]) -> TurboStates:
        norms, codes = parts
        return TurboStates(norms, codes, self)


def _turned(vectors: mx.array, turn: mx.array) -> mx.array:
    """Rotate (..., D) in float32 by a rotation (D, D), or signs (D,) or (H, 1, D)."""
    if turn.ndim == 2:
        return vectors.astype(mx.float32) @ turn.T
    return mx.hadamard_transform(vectors * turn)


def _apart(vectors: mx.array) -> tuple[mx.array, mx.array]:
    """Return norms (..., 1), as they are stored, and directions (..., D) in float32."""
    vectors = vectors.astype(mx.float32)
    norms = mx.linalg.norm(vectors, axis=-1, keepdims=True)
    units = vectors / mx.maximum(norms, LEAST_NORM)
    return mx.minimum(norms, MOST_NORM).astype(mx.float16), units


class TurboStates(NamedTuple):
    """Coded keys or values (B, H, L, D) in place of an array."""

    norms: mx.array  # (B, H, L, 1) float16
    codes: mx.array  # (B, H, L, W) uint32
    layout: TurboLayout
    by_kernel: bool = False  # whether a kernel is to read them, where there is one

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, length, _ = self.norms.shape
        return (batch, heads, length, self.layout.depth)

    @property
    def parts(self) -> tuple[mx.array, mx.array]:
        return (self.norms, self.codes)

    def map(self, change: Callable[[mx.array], mx.array]) -> TurboStates:
        norms, codes = map(change, self.parts)
        return self._replace(norms=norms, codes=codes)

    def between(self, begin: int, end: int) -> TurboStates:
        """Return the positions [begin, end)."""
        return self.map(lambda part: part[:, :, begin:end])

    def of_row(self, row: int) -> TurboStates:
        """Return one row's, as (1, H, L, D)."""
        return self.map(lambda part: part[row : row + 1])

    def directions(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """Return the rotated directions (B, H, L, D)."""
        return codebooks.directions_of(self.codes, *self.layout.coding, dtype)

    def rotated(self) -> mx.array:
        """Return the rotated vectors in float32."""
        if lookups.takes(self.norms.size * self.layout.depth):
            found = lookups.rotated(self.norms, self.codes, *self.layout.coding)
            if found is not None:
                return found
        return self.directions() * self.norms

    def dequantized(self) -> mx.array:
        """Return the vectors in float32."""
        return self.layout.restored(self.rotated())


class TurboCache(CodedCache):
    """One row's coded keys and values.

    Args:
        bits: Bits of a number; of a half, keys have the bits below and values those above.
        seed: Of the keys' rotation; the values' is the next.
    """

    def __init__(self, bits: float, seed: int = DEFAULT_TURBOQUANT_SEED) -> None:
        super().__init__()
        self.bits = bits
        self.seed = seed

    def fresh(self) -> TurboCache:
        return TurboCache(self.bits, self.seed)

    def layouts(
        self, key_depth: int, value_depth: int
    ) -> tuple[TurboLayout, TurboLayout]:
        _, key_bits, value_bits = resolve_kv_bits(self.bits)
        return (
            TurboLayout(int(key_bits), key_depth, self.seed),
            TurboLayout(int(value_bits), value_depth, self.seed + 1),
        )

    def slab(self, num_places: int) -> TurboSlabCache:
        return TurboSlabCache(num_places, self.fresh())

    def saved(self, length: int) -> TurboState:
        keys, values = self.state
        return TurboState(
            _owned(keys),
            _owned(values),
            self.bits,
            self.seed,
            (keys.layout.depth, values.layout.depth),
        )


def _owned(states: TurboStates) -> tuple[mx.array, ...]:
    norms, codes = map(own_array, states.parts)
    return (norms[..., 0], codes)


@filed
@dataclass(frozen=True)
class TurboState(LayerState):
    """Norms (1, H, L) and codes (1, H, L, W) of keys and of values."""

    keys: tuple[mx.array, ...]
    values: tuple[mx.array, ...]
    bits: float
    seed: int
    #: Widths of heads of keys and values; the first files have none.
    depths: tuple[int, ...] = ()
    is_whole = True

    def reaches(self, length: int) -> bool:
        return length <= int(self.keys[0].shape[2])

    def restore(self, length: int) -> TurboCache:
        cache = TurboCache(self.bits, self.seed)
        held = (self.keys, self.values)
        depths = self.depths or (0, 0)
        states: list[TurboStates] = []
        for layout, (norms, codes) in zip(cache.layouts(*depths), held, strict=True):
            if not layout.depth:
                layout = layout.of_width(codes.shape[3])
            states.append(layout.states((norms[..., None], codes)).between(0, length))
        keys, values = states
        restored: TurboCache = cache.holding(keys, values, length)
        return restored


class TurboSlabCache(CodedSlabCache):
    """Full attention as slabs of norms and codes."""

    #: The type of what was appended last, in which masks are added.
    _dtype: mx.Dtype | None = None

    @property
    def can_trace(self) -> bool:
        """On a CPU codes are looked up by numpy, which a graph cannot hold."""
        return device() is not Device.CPU and self._dtype is not None

    def append(self, keys: mx.array, values: mx.array) -> None:
        self._dtype = keys.dtype
        super().append(keys, values)

    def _mask_dtype(self) -> mx.Dtype:
        assert self._dtype is not None
        return self._dtype

    @property
    def state(self) -> Any:
        of_keys, of_values = self._layouts
        own, others = halves(self.slabs, self._num_stacked(), self._heads[0])
        keys, values = of_keys.states(own), of_values.states(others)
        if self.few_bits == KERNEL:
            return keys._replace(by_kernel=True), values
        if self.few_bits == UNPACKED:
            wide = (keys.dequantized(), values.dequantized())
            return tuple(array.astype(self._mask_dtype()) for array in wide)
        return keys, values
