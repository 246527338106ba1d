"""TurboQuant's codes on CUDA (``turbo.cu``), written and read: one launch where operations take a dozen.

A vector's codes depend on that vector alone. They are those of operations, but for numbers that rounding carries over a bound.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.cuda.launches import (
    Kernel,
    Launch,
    Run,
    is_right,
    kernel,
    on_device,
)
from vlm_batch.adapters.cuda.spans import TYPES
from vlm_batch.arrays import round_up
from vlm_batch.caches.coded import halves
from vlm_batch.caches.turbo import TurboLayout, TurboStates
from vlm_batch.runtime.device import Device, device

#: Numbers of a vector that a warp turns.
NARROWEST, WIDEST = 32, 256
#: Numbers of a thread, as in ``turbo.cu``; threads of a block.
UNIT, THREADS = 8, 128
#: How far rounding may carry a direction's number over a bound.
TOLERANCE = 1e-5
#: How far a norm may be rounded, as a share of it: float16 has ten digits.
OF_NORM = 2.0**-10

_CODE = """
  constexpr int HEADS = HEADS_K + HEADS_V, BOUNDS_K = (1 << BITS_K) - 1, BOUNDS = BOUNDS_K + (1 << BITS_V) - 1;
  constexpr int WIDTH_K = DEPTH * BITS_K / 32, WIDTH_V = DEPTH * BITS_V / 32, LANES = turbo::lanes<DEPTH>();
  __shared__ float shared[BOUNDS];
  for (int i = threadIdx.x; i < BOUNDS; i += blockDim.x) shared[i] = bounds[i];
  __syncthreads();
  const int lane = threadIdx.x % LANES, columns = keys_shape[2];
  const long long index = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  const bool is_there = index < (long long)keys_shape[0] * HEADS * columns;
  const long long at = is_there ? index : 0;
  const long long column = at % columns, head = at / columns % HEADS, row = at / columns / HEADS;
  const bool is_key = head < HEADS_K;
  const long long other = head - HEADS_K;
  const T* vector = is_key
      ? keys + row * keys_strides[0] + head * keys_strides[1] + column * keys_strides[2]
      : values + row * values_strides[0] + other * values_strides[1] + column * values_strides[2];
  float number[turbo::UNIT];
  turbo::load(number, vector, is_key ? keys_strides[3] : values_strides[3], lane);
  const float size = turbo::direct<DEPTH>(number, is_key ? signs : signs + DEPTH, lane);
  if (!is_there) return;
  if (lane == 0) norms[at] = S(size > 65504.0f ? 65504.0f : size);  // NaN stays
  if (is_key) {
    const long long own = IS_STACKED ? at : (row * HEADS_K + head) * columns + column;
    turbo::write_codes<BITS_K>(number, shared, codes + own * WIDTH_K, lane);
  } else {
    const long long own = IS_STACKED ? at : (row * HEADS_V + other) * columns + column;
    unsigned int* words = IS_STACKED ? codes : others;
    turbo::write_codes<BITS_V>(number, shared + BOUNDS_K, words + own * WIDTH_V, lane);
  }
"""


def _restored(what: str, letter: str, signs: str, book: str) -> str:
    """Return C++ that restores keys or values."""
    norms, codes = f"{what}_norms", f"{what}_codes"
    at = " + ".join(
        f"{index} * {{0}}_strides[{axis}]"
        for axis, index in enumerate(("row", "head", "column"))
    )
    return f"""
    constexpr int LANES = turbo::lanes<DEPTH_{letter}>();
    const int lane = index % LANES;
    const bool is_there = index / LANES < columns;
    const long long column = is_there ? index / LANES : 0;
    const float norm = float({norms}[{at.format(norms)}]);
    turbo::look_up<BITS_{letter}>(number, {codes} + {at.format(codes)}, norm, {book}, lane);
    turbo::turn_back<DEPTH_{letter}>(number, {signs}, lane);
    T* out = {what} + ((row * gridDim.y + head) * columns + column) * DEPTH_{letter};
    if (is_there) turbo::store<T>(number, out, lane);"""


_RESTORE = f"""
  constexpr int NUMBERS_K = 1 << BITS_K, NUMBERS = NUMBERS_K + (1 << BITS_V);
  __shared__ float book[NUMBERS];
  for (int i = threadIdx.x; i < NUMBERS; i += blockDim.x) book[i] = books[i];
  __syncthreads();
  const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x, columns = keys_norms_shape[2];
  const long long head = blockIdx.y, row = blockIdx.z / 2;
  float number[turbo::UNIT];
  if (blockIdx.z % 2 == 0) {{{_restored("keys", "K", "signs", "book")}
  }} else {{{_restored("values", "V", "signs + DEPTH_K", "book + NUMBERS_K")}
  }}
"""


@lru_cache(maxsize=1)
def code_kernel() -> Kernel:
    inputs = ("keys", "values", "signs", "bounds")
    return kernel("turbo", "code", inputs, ("norms", "codes", "others"), _CODE)


@lru_cache(maxsize=1)
def restore_kernel() -> Kernel:
    coded = ("keys_norms", "keys_codes", "values_norms", "values_codes")
    inputs = (*coded, "signs", "books")
    return kernel("turbo", "restore", inputs, ("keys", "values"), _RESTORE)


class CodeBuild(NamedTuple):
    """The facts that a kernel is built for."""

    keys: TurboLayout
    values: TurboLayout
    heads: tuple[int, int]  # of keys, of values
    dtype: mx.Dtype

    @property
    def is_stacked(self) -> bool:
        return self.keys.num_stacked(self.values) > 1


def _grid(vectors: int, depth: int) -> tuple[int, int, int]:
    return (round_up(vectors * depth // UNIT, THREADS), 1, 1)


@lru_cache(maxsize=256)
def code_launch(build: CodeBuild, rows: int, columns: int) -> Launch:
    keys, values, heads = build.keys, build.values, sum(build.heads)
    template = {
        "T": build.dtype,
        "S": mx.float16,
        "DEPTH": keys.depth,
        "BITS_K": keys.bits,
        "BITS_V": values.bits,
        "HEADS_K": build.heads[0],
        "HEADS_V": build.heads[1],
        "IS_STACKED": build.is_stacked,
    }
    codes = (rows, build.heads[0], columns, keys.width)
    others: tuple[int, ...] = (rows, build.heads[1], columns, values.width)
    if build.is_stacked:
        codes, others = (rows, heads, columns, keys.width), (1,)
    return Launch(
        code_kernel(),
        tuple(template.items()),
        _grid(rows * heads * columns, keys.depth),
        (THREADS, 1, 1),
        ((rows, heads, columns, 1), codes, others),
        (mx.float16, mx.uint32, mx.uint32),
    )


@lru_cache(maxsize=256)
def restore_launch(
    keys: TurboLayout, values: TurboLayout, shape: tuple[int, int, int], dtype: mx.Dtype
) -> Launch:
    """Return the launch that restores keys and values (rows, heads, columns)."""
    template = {
        "T": dtype,
        "DEPTH_K": keys.depth,
        "DEPTH_V": values.depth,
        "BITS_K": keys.bits,
        "BITS_V": values.bits,
    }
    rows, heads, columns = shape
    units = columns * max(keys.depth, values.depth) // UNIT
    return Launch(
        restore_kernel(),
        tuple(template.items()),
        (round_up(units, THREADS), heads, 2 * rows),
        (THREADS, 1, 1),
        ((*shape, keys.depth), (*shape, values.depth)),
        (dtype, dtype),
    )


@lru_cache(maxsize=16)
def _signs(*layouts: TurboLayout) -> mx.array:
    return mx.concatenate([layout.turn for layout in layouts])


@lru_cache(maxsize=16)
def _bounds(keys: TurboLayout, values: TurboLayout) -> mx.array:
    return mx.concatenate([keys.book.between, values.book.between])


@lru_cache(maxsize=16)
def books(keys: TurboLayout, values: TurboLayout) -> mx.array:
    """Return the numbers of keys' codes, and of values' behind them."""
    return mx.array(np.concatenate([keys.book.numbers, values.book.numbers]))


def code(
    build: CodeBuild, keys: mx.array, values: mx.array, run: Run
) -> list[mx.array]:
    """Code keys and values (B, H, L, D).

    Returns:
        Norms (B, H, L, 1) of keys and of values behind them, and their codes likewise; in two arrays where they differ.
    """
    launch = code_launch(build, keys.shape[0], keys.shape[2])
    layouts = (build.keys, build.values)
    constants = [_signs(*layouts), _bounds(*layouts)]
    norms, codes, others = run(launch, [keys, values, *constants])
    return [norms, codes] if build.is_stacked else [norms, codes, others]


def restore(
    keys: TurboStates, values: TurboStates, dtype: mx.Dtype, run: Run
) -> list[mx.array]:
    """Return keys and values (B, H, L, D) in full."""
    layouts = (keys.layout, values.layout)
    launch = restore_launch(*layouts, keys.shape[:3], dtype)
    constants = [_signs(*layouts), books(*layouts)]
    return run(launch, [*keys.parts, *values.parts, *constants])


def code_where_right(
    keys_by: TurboLayout, values_by: TurboLayout, keys: mx.array, values: mx.array
) -> list[mx.array] | None:
    """Run ``code`` if the kernel supports these arrays accurately here, else return None."""
    if device() is not Device.CUDA:
        return None
    heads = (keys.shape[1], values.shape[1])
    build = CodeBuild(keys_by, values_by, heads, keys.dtype)
    if not is_served(build) or values.dtype != keys.dtype or not _is_right(build):
        return None
    return code(build, keys, values, on_device)


def restore_where_right(
    keys: TurboStates, values: TurboStates, dtype: mx.Dtype
) -> list[mx.array] | None:
    """Run ``restore`` if the kernel supports these arrays accurately here, else return None."""
    if device() is not Device.CUDA or dtype not in TYPES:
        return None
    layouts = (keys.layout, values.layout)
    if keys.shape[:3] != values.shape[:3] or not all(map(has_lanes, layouts)):
        return None
    if not _restores_right(*layouts, dtype):
        return None
    return restore(keys, values, dtype, on_device)


@lru_cache(maxsize=64)
def is_served(build: CodeBuild) -> bool:
    """Whether the kernel is written for a build."""
    needs = (
        has_lanes(build.keys),
        build.keys.depth == build.values.depth,
        build.dtype in TYPES,
    )
    return all(needs)


def has_lanes(layout: TurboLayout) -> bool:
    """Whether lanes of a warp can rotate a layout's vectors."""
    return layout.turn.ndim == 1 and NARROWEST <= layout.depth <= WIDEST


@lru_cache(maxsize=64)
def _is_right(build: CodeBuild) -> bool:
    return is_right(
        lambda: farthest(build, on_device),
        TOLERANCE,
        "TurboQuant's codes are found by operations: the kernel that codes",
    )


@lru_cache(maxsize=64)
def _restores_right(keys: TurboLayout, values: TurboLayout, dtype: mx.Dtype) -> bool:
    return is_right(
        lambda: farthest_restored(keys, values, dtype, on_device),
        TOLERANCE,
        "TurboQuant's codes are looked up by operations: the kernel that restores",
    )


def farthest(build: CodeBuild, run: Run, columns: int = 3, seed: int = 0) -> float:
    """Return how far a direction's number is at most beyond the bounds of its code, over random keys and values.

    More than that where a norm is another; NaN if any is.
    """
    random = np.random.RandomState(seed)
    depth, layouts = build.keys.depth, (build.keys, build.values)
    given: list[mx.array] = []
    for heads in build.heads:
        drawn = random.standard_normal((2, heads, columns, depth)) * 3
        given.append(mx.array(drawn).astype(build.dtype))
    keys, values = given
    parts = code(build, keys, values, run)
    each = halves(parts, build.keys.num_stacked(build.values), build.heads[0])
    errors: list[float] = []
    for vectors, layout, (own, codes) in zip(given, layouts, each, strict=True):
        wide = vectors.astype(mx.float32)
        right = mx.linalg.norm(wide, axis=-1, keepdims=True)
        numbers = np.array(layout.rotated(wide / right))
        found = np.array(layout.states([own, codes]).directions())
        book = layout.book
        code_found = np.searchsorted(book.numbers, found)
        low = np.append(-np.float32(np.inf), book.bounds)[code_found]
        errors.append(
            float(np.maximum(low - numbers, numbers - book.bounds[code_found]).max())
        )
        off = mx.abs(own.astype(mx.float32) - right) / right
        errors.append(float(np.array(off).max()) - OF_NORM)
    return float(np.max(errors))


def _beyond_rounding(found: mx.array, right: mx.array) -> float:
    """Return the largest difference, less what ``found``'s type rounds of a number; NaN if any is."""
    off = mx.abs(found.astype(mx.float32) - right)
    rounded = mx.abs(right) * (mx.finfo(found.dtype).eps / 2)
    return float(np.array(off - rounded).max())


def farthest_restored(
    keys: TurboLayout, values: TurboLayout, dtype: mx.Dtype, run: Run, seed: int = 0
) -> float:
    """Return the largest error of a number that is restored, beyond its type's rounding, over columns of longer arrays."""
    random = np.random.RandomState(seed)
    given: list[TurboStates] = []
    for layout in (keys, values):
        vectors = mx.array(random.standard_normal((2, 3, 41, layout.depth)))
        coded = layout.code(vectors.astype(mx.float32))
        given.append(coded.between(0, 37))
    found = restore(given[0], given[1], dtype, run)
    errors = [
        _beyond_rounding(one, states.dequantized())
        for one, states in zip(found, given, strict=True)
    ]
    return float(np.max(errors))
