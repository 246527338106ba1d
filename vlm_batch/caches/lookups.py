"""Codes to numbers and back on a CPU, by numpy.

MLX 0.32 gathers one number at a time on a CPU: 3 to 8 ns a number, where numpy takes 0.3 for two or four together. So several
codes are one field, and a table has their numbers. What is large is evaluated, and numpy writes into MLX's memory.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from vlm_batch.arrays import round_up
from vlm_batch.caches.codebooks import (
    BUCKETS,
    CODES_OF_FIELD,
    Codebook,
    codebook,
    numbers_of_fields,
)
from vlm_batch.runtime.device import Device, device
from vlm_batch.runtime.exponentials import evaluated, view

#: The fewest numbers that numpy looks up.
FEWEST = 2**14
#: Codes that are packed together, as one number of 64 bits.
TOGETHER = 8
#: Numbers of a block, which stay in a core's second cache.
BLOCK = 2**16
#: Codes of a field -> a type of as many float32 numbers.
NUMBERS = {2: np.complex64, 4: np.complex128}


class Table(NamedTuple):
    """The numbers of every field."""

    bits: int  # of a field
    codes: int  # of a field
    numbers: np.ndarray  # (2 ** bits,) of ``codes`` numbers each


@lru_cache(maxsize=16)
def table(width: int, depth: int) -> Table:
    """Return the table of codes of ``width`` bits for directions of ``depth`` numbers."""
    codes = CODES_OF_FIELD[width]
    numbers = numbers_of_fields(width, depth, codes)
    return Table(codes * width, codes, numbers.view(NUMBERS[codes])[:, 0])


def is_numpys() -> bool:
    """Whether numpy looks codes up here."""
    return device() is Device.CPU


def takes(size: int) -> bool:
    """Whether numpy looks up so many codes of a prompt."""
    return size >= FEWEST and is_numpys()


def filled_depth(bits: int, depth: int) -> int:
    """Return the width of vectors of whole fields."""
    return round_up(depth, CODES_OF_FIELD[bits])


def directions(words: np.ndarray, bits: int, depth: int, out: np.ndarray) -> None:
    """Look the codes of words (..., W) up: rotated directions (..., D) float32, filled to whole fields."""
    found = table(bits, depth)
    fields = _fields(words, found.bits, out.shape[-1] // found.codes)
    # every field is in the table: "clip" saves numpy a test and a copy
    np.take(found.numbers, fields, mode="clip", out=out.view(found.numbers.dtype))


def _fields(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return the first fields (..., count) of words (..., W)."""
    if bits == 16:
        return words.view(np.uint16)[..., :count]
    if bits == 8:
        return words.view(np.uint8)[..., :count]
    # fields come again at the same places after so many words
    size = bits // int(np.gcd(bits, 32))
    together = 32 * size // bits
    runs = -(-count // together)
    missing = runs * size - words.shape[-1]
    if missing > 0:
        words = np.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, missing)])
    shape = (*words.shape[:-1], runs)
    apart = words[..., : runs * size].reshape(*shape, size)
    lanes = [np.ascontiguousarray(apart[..., at]) for at in range(size)]
    found = np.empty((*shape, together), np.uint16)
    last = np.uint32((1 << bits) - 1)
    for at in range(together):
        word, shift = divmod(at * bits, 32)
        field = lanes[word] >> shift
        if shift + bits > 32:
            field |= lanes[word + 1] << (32 - shift)
        found[..., at] = field & last
    return found.reshape(*words.shape[:-1], -1)[..., :count]


class _Scratch(threading.local):
    """Memory of a block. Fresh memory would come from the system, page by page."""

    def __init__(self) -> None:
        self.numbers = np.empty(0, np.float32)

    def of(self, *shape: int) -> np.ndarray:
        size = int(np.prod(shape))
        if self.numbers.size < size:
            self.numbers = np.empty(size, np.float32)
        return self.numbers[:size].reshape(shape)


_scratch = _Scratch()


def block(words: np.ndarray, bits: int, depth: int) -> np.ndarray:
    """Look up words (H, K, W): directions (H, K, D), filled, which the thread's next block overwrites."""
    found = _scratch.of(*words.shape[:-1], filled_depth(bits, depth))
    directions(words, bits, depth, found)
    return found


def rotated(norms: mx.array, words: mx.array, bits: int, depth: int) -> mx.array | None:
    """Return the rotated vectors (B, H, L, D) of norms (B, H, L, 1) and words; None while MLX traces."""
    found = mx.zeros((*norms.shape[:-1], filled_depth(bits, depth)))
    if not evaluated(found, norms, words):
        return None
    out, all_words = view(found), view(words)
    all_norms = view(norms).astype(np.float32)
    columns = max(1, BLOCK // out.shape[-1])
    for row, head in np.ndindex(out.shape[:2]):
        for begin in range(0, out.shape[2], columns):
            at = (row, head, slice(begin, begin + columns))
            directions(all_words[at], bits, depth, out[at])
            out[at] *= all_norms[at]
    return found[..., :depth]


def packed(directions: mx.array, bits: int, depth: int, width: int) -> mx.array | None:
    """Return the codes (..., width) uint32 of rotated directions (..., D); None while MLX traces."""
    found = mx.zeros((*directions.shape[:-1], width), mx.uint32)
    if not evaluated(found, directions):
        return None
    book, count = codebook(depth, bits), -(-depth // TOGETHER)
    numbers = np.array(directions).reshape(-1, depth)
    words = view(found).reshape(-1, width)
    rows = max(1, BLOCK // depth)
    codes = np.zeros((min(rows, len(numbers)), count * TOGETHER), np.uint8)
    with np.errstate(invalid="ignore"):
        for begin in range(0, len(numbers), rows):
            block = numbers[begin : begin + rows]
            _write_codes(block, book, codes[: len(block), :depth])
            _write_words(codes[: len(block)], bits, words[begin : begin + rows])
    return found


def _write_codes(numbers: np.ndarray, book: Codebook, codes: np.ndarray) -> None:
    half = np.float32(BUCKETS // 2)
    at = (numbers * half + half).astype(np.int32)
    found = np.take(book.first, at, mode="clip")
    for _ in range(book.most_bounds):
        found += numbers > np.take(book.bounds, found, mode="clip")
    codes[:] = found


def _write_words(codes: np.ndarray, bits: int, words: np.ndarray) -> None:
    """Pack rows of codes (R, N) as words (R, W): three times, half of each lane moves down behind the other half."""
    lanes = codes.view(np.uint64)
    for lower, shift in _folds(bits):
        lanes = (lanes & lower) | ((lanes & ~lower) >> shift)
    whole = lanes.view(np.uint8).reshape(*lanes.shape, TOGETHER)[..., :bits]
    room = words.view(np.uint8)
    own = whole.reshape(len(words), -1)[:, : room.shape[1]]
    room[:, : own.shape[1]] = own


def _folds(bits: int) -> list[tuple[np.uint64, np.uint64]]:
    """Return masks of the lower halves of lanes, and how far the upper halves move."""
    return [
        (np.uint64(0x00FF00FF00FF00FF), np.uint64(8 - bits)),
        (np.uint64(0x0000FFFF0000FFFF), np.uint64(16 - 2 * bits)),
        (np.uint64(0x00000000FFFFFFFF), np.uint64(32 - 4 * bits)),
    ]
