"""Exponentials on a CPU by numpy, where MLX's take many times as long.

MLX 0.32's x86 wheel handles one number at a time, and calls the C library for every fused multiply-add
(docs/upstream/exponentials.py). numpy has vectors for AVX2 and AVX-512. So large arrays are evaluated, and numpy works in
place, in MLX's memory, block by block, on as many threads as BLAS has. A number's bits depend on that number alone, and a
row's on that row.

A trial of a few milliseconds decides, once a process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeAlias, TypeVar

import mlx.core as mx
import numpy as np

from vlm_batch.runtime import blas
from vlm_batch.runtime.device import Device, device

#: Changes float32 numbers (N,) in place, with spare ones (``SPARE``, N) to write to.
Kernel: TypeAlias = Callable[[np.ndarray, np.ndarray], None]

#: Numbers of a block, which stays in a core's second cache with the spare ones. Rows need none.
BLOCK, BLOCK_OF_ROWS = 2**15, 2**17
#: Spare numbers for each of a block. Fresh arrays of this size would come from the system, page by page.
SPARE = 3
#: The fewest numbers for which an evaluation pays.
FEWEST = 2**12
#: Numbers of the trial.
TRIED = 2**14
#: How many times as long MLX takes at least, where numpy is used. Where it is, 20 to 55 were measured.
TIMES = 4.0

Block = TypeVar("Block")

FLOATS = (mx.float32, mx.float16, mx.bfloat16)

#: MLX's functions, kept before any hook.
SOFTMAX, LOGSUMEXP, EXP = mx.softmax, mx.logsumexp, mx.exp


class _Spare(threading.local):
    def __init__(self) -> None:
        self.numbers = np.empty((SPARE, BLOCK), np.float32)


_spare = _Spare()


def is_numpys() -> bool:
    """Whether numpy computes exponentials of large arrays here."""
    return device() is Device.CPU and _is_faster()


@cache
def _is_faster() -> bool:
    numbers = mx.array(np.linspace(-8, 0, TRIED, dtype=np.float32))
    own = np.array(numbers)
    out = np.empty_like(own)
    launched = _best_time(lambda: mx.eval(numbers + 1))  # what is no exponential
    theirs = _best_time(lambda: mx.eval(EXP(numbers))) - launched
    return theirs > TIMES * _best_time(lambda: np.exp(own, out=out))


def _best_time(call: Callable[[], Any]) -> float:
    """Return the seconds of a call: the fastest of four, after one."""
    call()
    found = []
    for _ in range(4):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def facts() -> dict[str, str]:
    """Return what computes exponentials of large arrays, for records; {} where MLX does."""
    return {"exponentials": f"numpy {np.__version__}"} if is_numpys() else {}


# Arrays ---------------------------------------------------------------------------------------------------------------


def evaluated(*arrays: mx.array) -> bool:
    """Evaluate arrays; return False while MLX traces them."""
    try:
        mx.eval(*arrays)
    except (ValueError, RuntimeError) as error:
        if "transformation" not in str(error):
            raise
        return False
    return True


def view(array: mx.array) -> np.ndarray:
    """Return an evaluated float32 array's own memory, writable."""
    return np.array(array, copy=False)


def changed(kernel: Kernel, array: mx.array) -> mx.array | None:
    """Return what ``kernel`` makes of each number, in the array's type; None while MLX traces."""
    fresh = _fresh(array)
    if not evaluated(fresh):
        return None
    numbers = view(fresh).reshape(-1)
    blocks = [numbers[start : start + BLOCK] for start in range(0, numbers.size, BLOCK)]
    each(lambda block: kernel(block, _spare.numbers[:, : block.size]), blocks)
    return fresh.astype(array.dtype)


def softmax(array: mx.array) -> mx.array | None:
    """Return the softmax along the last axis, in the array's type; None while MLX traces."""
    fresh = _fresh(array)
    if not evaluated(fresh):
        return None
    each(_divide, _blocks(view(fresh).reshape(-1, array.shape[-1])))
    return fresh.astype(array.dtype)


def logsumexp(array: mx.array) -> mx.array | None:
    """Return the log of the last axis's sum of exponentials, (...,) in the array's type; None while MLX traces."""
    whole = mx.contiguous(array.astype(mx.float32))
    if not evaluated(whole):
        return None
    rows = view(whole).reshape(-1, array.shape[-1])
    found = np.empty(len(rows), np.float32)
    _write(_logs, rows, found[:, None])
    return mx.array(found.reshape(array.shape[:-1])).astype(array.dtype)


def log_of_sum(rows: mx.array) -> mx.array:
    """Return ``logsumexp`` (R, 1) of rows (R, V), whichever way is faster for V."""
    found = logsumexp(rows) if rows.shape[-1] >= FEWEST and is_numpys() else None
    return (
        LOGSUMEXP(rows, axis=-1, keepdims=True) if found is None else found[..., None]
    )


def gumbel(uniform: mx.array) -> mx.array:
    """Return Gumbel noise -log(-log(u)) of uniform numbers (V,), as ``mx.random.gumbel`` makes it of its own."""
    found = (
        changed(_gumbel, uniform) if uniform.size >= FEWEST and is_numpys() else None
    )
    return -mx.log(-mx.log(uniform)) if found is None else found


def exponentials(rows: np.ndarray) -> np.ndarray:
    """Turn rows (R, K) into exponentials of their distance from the largest, in place. Returns the sums (R, 1)."""
    rows -= rows.max(axis=-1, keepdims=True)
    np.exp(rows, out=rows)
    total: np.ndarray = rows.sum(axis=-1, keepdims=True)
    return total


def turned(rows: np.ndarray) -> np.ndarray:
    """Do what ``exponentials`` does to rows (..., K) that lie together, on several threads. Returns the sums (..., 1)."""
    flat = rows.reshape(-1, rows.shape[-1])
    totals = np.empty((len(flat), 1), np.float32)
    _write(exponentials, flat, totals)
    return totals.reshape(*rows.shape[:-1], 1)


def _fresh(array: mx.array) -> mx.array:
    """Return a float32 copy that nobody else holds, row by row in memory."""
    return mx.contiguous(
        array * 1 if array.dtype == mx.float32 else array.astype(mx.float32)
    )


def _blocks(rows: np.ndarray, columns: int | None = None) -> list[np.ndarray]:
    """Cut rows (R, C) into blocks, as rows of so many columns are cut."""
    size = max(1, BLOCK_OF_ROWS // (columns or rows.shape[1]))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _divide(block: np.ndarray) -> None:
    block /= exponentials(block)


def _write(
    of_rows: Callable[[np.ndarray], np.ndarray], rows: np.ndarray, found: np.ndarray
) -> None:
    """Write what ``of_rows`` returns of rows (R, K), one number each, to ``found`` (R, 1)."""

    def work(both: tuple[np.ndarray, np.ndarray]) -> None:
        both[1][:] = of_rows(both[0])

    blocks = _blocks(rows), _blocks(found, rows.shape[1])
    each(work, list(zip(*blocks, strict=True)))


def _logs(rows: np.ndarray) -> np.ndarray:
    largest = rows.max(axis=-1, keepdims=True)
    total = np.log(exponentials(rows.copy())) + largest
    return np.where(np.isinf(largest), largest, total)


# Threads --------------------------------------------------------------------------------------------------------------


def each(work: Callable[[Block], None], blocks: Sequence[Block]) -> None:
    """Work on each block, in any order, on as many threads as BLAS has, the caller's among them."""
    helpers = min(blas.threads(), len(blocks)) - 1
    left = iter(blocks)  # a list's iterator gives each block to one thread

    def some() -> None:
        with np.errstate(all="ignore"):
            for block in left:
                work(block)

    waiting = [_pool().submit(some) for _ in range(helpers)]
    try:
        some()
    finally:
        # a pool that others keep busy is not waited for
        begun = [one for one in waiting if not one.cancel()]
        for one in begun:
            one.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        os.cpu_count(), thread_name_prefix="vlm-batch-exponentials"
    )


if os.name == "posix":
    # a child has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


# Kernels --------------------------------------------------------------------------------------------------------------


def exp(x: np.ndarray, spare: np.ndarray) -> None:
    np.exp(x, out=x)


def sin(x: np.ndarray, spare: np.ndarray) -> None:
    np.sin(x, out=x)


def cos(x: np.ndarray, spare: np.ndarray) -> None:
    np.cos(x, out=x)


def _gumbel(x: np.ndarray, spare: np.ndarray) -> None:
    for _ in range(2):
        np.log(x, out=x)
        np.negative(x, out=x)


def tanh(x: np.ndarray, spare: np.ndarray) -> None:
    np.tanh(x, out=x)


def sigmoid(x: np.ndarray, spare: np.ndarray) -> None:
    np.reciprocal(_one_plus_exp(x, -1, spare), out=x)


def silu(x: np.ndarray, spare: np.ndarray) -> None:
    np.divide(x, _one_plus_exp(x, -1, spare), out=x)


def gelu_by_sigmoid(x: np.ndarray, spare: np.ndarray) -> None:
    np.divide(x, _one_plus_exp(x, -1.702, spare), out=x)


def gelu_by_tanh(x: np.ndarray, spare: np.ndarray) -> None:
    """(1 + tanh u) / 2 is the sigmoid of 2 u, and keeps its digits where tanh is near -1."""
    inner, twice = spare[0], np.float32(-2 * np.sqrt(2 / np.pi))
    np.multiply(x, x, out=inner)
    inner *= np.float32(0.044715) * twice
    inner += twice
    inner *= x
    np.exp(inner, out=inner)
    inner += np.float32(1)
    np.divide(x, inner, out=x)


def gelu(x: np.ndarray, spare: np.ndarray) -> None:
    """max(x, 0) - |x| / 2 erfc(|x| / sqrt 2), which keeps its digits where erf is near -1."""
    size, complement = _erfc(x, np.float32(np.sqrt(0.5)), spare)
    size *= complement
    size *= np.float32(np.sqrt(0.5))
    np.maximum(x, np.float32(0), out=x)
    x -= size


def erf(x: np.ndarray, spare: np.ndarray) -> None:
    _, complement = _erfc(x, np.float32(1), spare)
    np.subtract(np.float32(1), complement, out=complement)
    np.copysign(complement, x, out=x)


def _erfc(
    x: np.ndarray, factor: np.float32, spare: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the size of ``x`` times a factor, at most 16, and its erfc.

    It is Abramowitz and Stegun 7.1.26, as MLX's, within 1.5e-7.
    """
    size, t, found = spare
    np.abs(x, out=size)
    size *= factor
    # where erfc is 0 already: infinity times 0 would be nan
    np.minimum(size, np.float32(16), out=size)
    np.multiply(size, np.float32(0.3275911), out=t)
    t += np.float32(1)
    np.reciprocal(t, out=t)
    np.multiply(t, np.float32(1.061405429), out=found)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        found += np.float32(coefficient)
        found *= t
    np.multiply(size, size, out=t)
    np.negative(t, out=t)
    np.exp(t, out=t)
    found *= t
    return size, found


def _one_plus_exp(x: np.ndarray, factor: float, spare: np.ndarray) -> np.ndarray:
    found = spare[0]
    np.multiply(x, np.float32(factor), out=found)
    np.exp(found, out=found)
    found += np.float32(1)
    return found
