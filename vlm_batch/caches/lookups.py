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
from vlm_batch.caches.codebooks import BUCKETS, Codebook, codebook
from vlm_batch.runtime.device import Device, device
from vlm_batch.runtime.exponentials import evaluated, view

#: The fewest numbers for which an evaluation pays.
FEWEST = 2**14
#: Numbers of a block, which stay in a core's second cache.
BLOCK = 2**16
#: Bits -> codes of a field. Tables have up to 1 MB.
CODES_OF_FIELD = {2: 4, 3: 4, 4: 4, 5: 2, 6: 2, 7: 2, 8: 2}
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
    bits = codes * width
    fields = np.arange(1 << bits)[:, None]
    each = fields >> (width * np.arange(codes)) & ((1 << width) - 1)
    numbers = np.ascontiguousarray(codebook(depth, width).numbers[each])
    return Table(bits, codes, numbers.view(NUMBERS[codes])[:, 0])


def is_numpys() -> bool:
    """Whether numpy looks codes up here."""
    return device() is Device.CPU


def takes(size: int) -> bool:
    """Whether numpy looks up or finds so many codes of a prompt."""
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


def codes_of(numbers: mx.array, book: Codebook) -> mx.array | None:
    """Return the codes (..., D) uint8 of rotated directions; None where MLX is to find them."""
    if not takes(numbers.size):
        return None
    found = mx.zeros(numbers.shape, mx.uint8)
    if not evaluated(found, numbers):
        return None
    flat, codes = np.array(numbers).reshape(-1), view(found).reshape(-1)
    with np.errstate(invalid="ignore"):
        for begin in range(0, flat.size, BLOCK):
            end = begin + BLOCK
            _write_codes(flat[begin:end], book, codes[begin:end])
    return found


def _write_codes(numbers: np.ndarray, book: Codebook, codes: np.ndarray) -> None:
    half = np.float32(BUCKETS // 2)
    at = (numbers * half + half).astype(np.int32)
    np.take(book.first, at, mode="clip", out=codes)
    for _ in range(book.most_bounds):
        codes += numbers > np.take(book.bounds, codes, mode="clip")
