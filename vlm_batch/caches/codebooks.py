"""TurboQuant's codes (arXiv:2504.19874): a vector as its norm, and a code for each number of its rotated direction.

The rotations and codebooks are mlx-vlm's, and so is the order of bits: code ``i`` of ``b`` bits begins at bit ``i * b`` of
words of 32. mlx-vlm's own functions code and pack number by number. Here eight codes are packed as one number of 64 bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx_vlm import turboquant as upstream

from vlm_batch.arrays import round_up

#: Parts of [-1, 1] by which a number's code is looked up.
BUCKETS = 4096
#: How far rounding may carry a number over a bucket's edge.
EDGE = 1e-6
#: Numbers that share a word of 64 bits, while they are packed.
TOGETHER = 8


class Codebook(NamedTuple):
    """Codes of ``bits`` for directions of ``depth`` numbers."""

    numbers: np.ndarray  # (2 ** bits,) of each code, ascending
    bounds: (
        np.ndarray
    )  # between those, and infinity: a code counts the bounds below a number
    first: np.ndarray  # (BUCKETS,) the least code of a bucket
    most_bounds: int  # within one bucket
    arrays: tuple[mx.array, mx.array, mx.array]  # the first three, made once


@lru_cache(maxsize=64)
def codebook(depth: int, bits: int) -> Codebook:
    numbers = np.array(upstream._codebook(depth, bits))
    bounds = (numbers[:-1] + numbers[1:]) / np.float32(2)
    edges = np.arange(BUCKETS + 1) * (2 / BUCKETS) - 1
    first = np.searchsorted(bounds, edges[:-1] - EDGE)
    last = np.searchsorted(bounds, edges[1:] + EDGE)
    parts = (numbers, np.append(bounds, np.float32(np.inf)), first.astype(np.uint8))
    on_device = (mx.array(parts[0]), mx.array(parts[1]), mx.array(parts[2]))
    return Codebook(*parts, int((last - first).max()), on_device)


@lru_cache(maxsize=64)
def rotation(depth: int, seed: int) -> mx.array:
    """Return signs (D,) before a Hadamard transform, or a rotation (D, D) where widths are no powers of two."""
    if depth & (depth - 1) == 0:
        return mx.array(np.array(upstream._rht_sign_vector(depth, seed)))
    return mx.array(np.array(upstream._rotation_matrix(depth, seed)))


def codes_of(directions: mx.array, book: Codebook) -> mx.array:
    """Return the codes (..., D) uint8 of rotated directions: how many bounds are below each number."""
    half = BUCKETS // 2
    at = (directions * half + half).astype(mx.int32)
    _, bounds, first = book.arrays
    found = mx.take(first, mx.clip(at, 0, BUCKETS - 1))
    for _ in range(book.most_bounds):
        found = found + (directions > mx.take(bounds, found)).astype(mx.uint8)
    return found


# Packing --------------------------------------------------------------------------------------------------------------


class _Fold(NamedTuple):
    """Moves the upper half of each lane of 64 bits down behind the lower half's codes, and back."""

    lower: int  # a mask
    shift: int


def _folds(bits: int) -> list[_Fold]:
    return [
        _Fold(0x00FF00FF00FF00FF, 8 - bits),
        _Fold(0x0000FFFF0000FFFF, 16 - 2 * bits),
        _Fold(0x00000000FFFFFFFF, 32 - 4 * bits),
    ]


def pack(codes: mx.array, bits: int, width: int) -> mx.array:
    """Pack codes (..., D) uint8 as words (..., width) uint32."""
    lanes = _filled(codes, TOGETHER).view(mx.uint64)
    for fold in _folds(bits):
        lower = mx.array(fold.lower, mx.uint64)
        lanes = (lanes & lower) | ((lanes & ~lower) >> fold.shift)
    packed = lanes[..., None].view(mx.uint8)[..., :bits].flatten(-2)
    return _filled(packed[..., : 4 * width], 4 * width).view(mx.uint32)


def unpack(words: mx.array, bits: int, depth: int) -> mx.array:
    """Return the codes (..., depth) uint8 of words (..., W) uint32."""
    count = -(-depth // TOGETHER)
    packed = _filled(mx.contiguous(words).view(mx.uint8), bits)[..., : count * bits]
    packed = _filled(packed.reshape(*words.shape[:-1], count, bits), TOGETHER)
    lanes = packed.view(mx.uint64)[..., 0]
    lowest = 8 * TOGETHER
    for fold in reversed(_folds(bits)):
        lowest //= 2
        codes = lowest // 8 * bits  # bits of a lower half's codes
        kept = sum(((1 << codes) - 1) << start for start in range(0, 64, 2 * lowest))
        lower = mx.array(kept, mx.uint64)
        lanes = (lanes & lower) | ((lanes & ~lower) << fold.shift)
    return lanes.view(mx.uint8)[..., :depth]


def _filled(array: mx.array, step: int) -> mx.array:
    """Fill the last axis with zeros to a multiple of ``step``."""
    missing = round_up(array.shape[-1], step) - array.shape[-1]
    if not missing:
        return array
    return mx.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])
