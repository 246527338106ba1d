"""TurboQuant's codes (arXiv:2504.19874): a vector as its norm, and a code for each number of its rotated direction.

The rotations and codebooks are mlx-vlm's, and so is the order of bits: code ``i`` of ``b`` bits begins at bit ``i * b`` of
words of 32. What a GPU does is here, in as few operations as there can be: MLX starts a kernel for each. ``lookups.py`` is
the same for a CPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx_vlm import turboquant as upstream

from vlm_batch.arrays import round_up

#: Parts of [-1, 1] by which numpy looks a number's code up.
BUCKETS = 4096
#: How far rounding may carry a number over a bucket's edge.
EDGE = 1e-6
#: Bits of a code -> codes of a field. Every field is in a table, of up to 1 MB.
CODES_OF_FIELD = {2: 4, 3: 4, 4: 4, 5: 2, 6: 2, 7: 2, 8: 2}


class Codebook(NamedTuple):
    """Codes of ``bits`` for directions of ``depth`` numbers."""

    numbers: np.ndarray  # (2 ** bits,) of each code, ascending
    #: Between those, and infinity: a code counts the bounds below a number.
    bounds: np.ndarray
    first: np.ndarray  # (BUCKETS,) the least code of a bucket
    most_bounds: int  # within one bucket
    between: mx.array  # the bounds without infinity


@lru_cache(maxsize=64)
def codebook(depth: int, bits: int) -> Codebook:
    numbers = np.array(upstream._codebook(depth, bits))
    bounds = (numbers[:-1] + numbers[1:]) / np.float32(2)
    edges = np.arange(BUCKETS + 1) * (2 / BUCKETS) - 1
    first = np.searchsorted(bounds, edges[:-1] - EDGE)
    last = np.searchsorted(bounds, edges[1:] + EDGE)
    return Codebook(
        numbers,
        np.append(bounds, np.float32(np.inf)),
        first.astype(np.uint8),
        int((last - first).max()),
        mx.array(bounds),
    )


@lru_cache(maxsize=64)
def rotation(depth: int, seed: int) -> mx.array:
    """Return signs (D,) before a Hadamard transform, or a rotation (D, D) where widths are no powers of two."""
    if depth & (depth - 1) == 0:
        return mx.array(np.array(upstream._rht_sign_vector(depth, seed)))
    return mx.array(np.array(upstream._rotation_matrix(depth, seed)))


@lru_cache(maxsize=64)
def scaled_signs(depth: int, seed: int, scale: float) -> mx.array:
    """Return ``rotation``'s signs times a scale, which is exact."""
    return rotation(depth, seed) * scale


@lru_cache(maxsize=64)
def both_signs(depth: int, seeds: tuple[int, int], heads: tuple[int, int]) -> mx.array:
    """Return ``rotation``'s signs (H, 1, D) for heads of keys, and those of values behind them."""
    each = [
        mx.broadcast_to(rotation(depth, seed), (count, 1, depth))
        for seed, count in zip(seeds, heads, strict=True)
    ]
    return mx.concatenate(each)


def codes_of(directions: mx.array, book: Codebook) -> mx.array:
    """Return the codes (..., D) uint32 of rotated directions: how many bounds are below each number."""
    return mx.searchsorted(book.between, directions)


# Packing --------------------------------------------------------------------------------------------------------------


class CodeLane(NamedTuple):
    """An integer that holds some codes. A word of 32 bits, or the least whole bytes of eight codes."""

    bits: int  # of a code
    codes: int
    dtype: mx.Dtype

    @property
    def num_bytes(self) -> int:
        return self.bits * self.codes // 8

    @property
    def is_word(self) -> bool:
        return self.num_bytes == 4

    def shifts(self, step: int = 1) -> mx.array:
        """Return where every ``step``-th code begins."""
        return _shifts(self, step)


def lane_of(bits: int) -> CodeLane:
    if 32 % bits == 0:
        return CodeLane(bits, 32 // bits, mx.uint32)
    return CodeLane(bits, 8, mx.uint32 if 8 * bits <= 32 else mx.uint64)


@lru_cache(maxsize=32)
def _shifts(lane: CodeLane, step: int) -> mx.array:
    return mx.arange(0, lane.bits * lane.codes, lane.bits * step).astype(lane.dtype)


def pack(codes: mx.array, bits: int, width: int) -> mx.array:
    """Pack codes (..., D) uint32 as words (..., width) uint32."""
    lane = lane_of(bits)
    filled = _filled(codes, lane.codes).astype(lane.dtype)
    apart = filled.reshape(*codes.shape[:-1], -1, lane.codes)
    lanes = mx.sum(apart << lane.shifts(), axis=-1)
    if lane.is_word:
        return lanes
    packed = lanes[..., None].view(mx.uint8)[..., : lane.num_bytes].flatten(-2)
    return _filled(packed[..., : 4 * width], 4 * width).view(mx.uint32)


def _fields(words: mx.array, bits: int) -> tuple[mx.array, int]:
    """Return the fields (..., F) of words (..., W), and how many codes each has."""
    whole = mx.contiguous(words).view(mx.uint8)
    if 8 % bits == 0:
        return whole, 8 // bits
    lane, codes = lane_of(bits), CODES_OF_FIELD[bits]
    size, head = lane.num_bytes, words.shape[:-1]
    packed = _filled(whole, size).reshape(*head, -1, size)
    lanes = _filled(packed, lane.dtype.size).view(lane.dtype)
    last = mx.array((1 << (bits * codes)) - 1, lane.dtype)
    return ((lanes >> lane.shifts(codes)) & last).flatten(-2), codes


def directions_of(
    words: mx.array, bits: int, depth: int, dtype: mx.Dtype = mx.float32
) -> mx.array:
    """Look the codes of words (..., W) up: rotated directions (..., D)."""
    fields, codes = _fields(words, bits)
    found = mx.take(_table(bits, depth, codes, dtype), fields, axis=0)
    return found.flatten(-2)[..., :depth]


@lru_cache(maxsize=64)
def _table(bits: int, depth: int, codes: int, dtype: mx.Dtype) -> mx.array:
    return mx.array(numbers_of_fields(bits, depth, codes)).astype(dtype)


def numbers_of_fields(bits: int, depth: int, codes: int) -> np.ndarray:
    """Return the numbers (fields, codes) of every field of so many codes."""
    fields = np.arange(1 << (bits * codes))[:, None]
    each = fields >> (bits * np.arange(codes)) & ((1 << bits) - 1)
    return np.ascontiguousarray(codebook(depth, bits).numbers[each])


def _filled(array: mx.array, step: int) -> mx.array:
    """Fill the last axis with zeros to a multiple of ``step``."""
    missing = round_up(array.shape[-1], step) - array.shape[-1]
    if not missing:
        return array
    return mx.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])
