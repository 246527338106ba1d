"""Attention and activations by a device's fastest operations (docs/log.md).

On a CPU, prompts and towers attend with numpy's exponentials where those are faster (``by_numpy``). Decode steps, which may
be graphs, cannot: in float32, MLX 0.32's exponentials and selections cost more than powers. So attention uses powers of e
and additive masks, block by block over visible keys. Heads sharing keys become rows of one product.

On CUDA, in half precision, cuDNN makes a plan for every new shape and strides
(mlx/backend/cuda/scaled_dot_product_attention.cpp, ``build_sdpa_cache_key``). A shape gets a plan once it recurs, in a
warm-up, or if its scores take too much memory. Otherwise attention is products and a softmax, so last bits depend on
earlier calls; a fixed ``Call`` goes by shapes alone.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import activations
from mlx_vlm.models.base import ensure_fused_sdpa

from vlm_batch.adapters import by_numpy, one_query
from vlm_batch.adapters.hooks import current, running, this_thread
from vlm_batch.caches.quantized import QuantizedStates

#: Calls of a shape before it gets a plan; a plan pays off after about 30 forwards of 36 layers.
USES_BEFORE_PLAN = 1024
#: A count beyond every threshold.
OFTEN = 2**32
#: The most scores (B * H * L * K) of attention that is computed without a plan.
MAX_SCORES = 2**22
MAX_SHAPES = 8192
#: Numbers that a tower's attention of one shape handles before it gets a plan: scores, and ``NUMBERS_OF_PATCH`` times a
#: patch's values.
NUMBERS_BEFORE_PLAN = 2**33
NUMBERS_OF_PATCH = 6
#: The factor by which a picture's exact length waits longer for a plan if its padded length has one.
FILLED_TIMES = 6
#: The smallest steps between padded lengths of pictures, and between numbers of windows.
LENGTH_STEP = 64
WINDOWS_STEP = 16
#: The most scores of a tower in memory at a time, without a plan.
BLOCK_SCORES = 2**26
#: The most scores of a prompt in memory at a time, without a plan.
PROMPT_SCORES = 2**23
#: The most scores of a prompt without a plan: ten launched layers take about 4 GB.
MAX_PROMPT_SCORES = 2**26
#: The most keys at which scores take about as much memory as queries.
FEW_KEYS = 128

#: cuBLAS's fast half-precision kernels read 16 bytes, so widths are padded to multiples of 8.
FAST_WIDTH = 8
#: The widest head that cuDNN's attention takes.
WIDEST = 128

#: Queries per block on a CPU.
BLOCK = 64
#: The most scores of a decode step over a slab for which fewer operations beat powers.
FEW_SCORES = 2**13
#: The fewest keys for which a single query gains from powers, if no heads share keys.
MANY_KEYS = 512
E = math.e
#: Bit widths that divide a byte.
CODES_OF_BYTES = (2, 4, 8)
#: The fewest heads per key head for which ``attend_codes`` pays.
FEW_HEADS = 4
#: The fewest numbers read by all heads for which ``attend_codes`` pays.
MANY_CODES = 2**20

#: mlx-vlm's own function, kept before any hook.
SWIGLU = activations.swiglu
#: The same operations as in a compiled decode step, so that both share one fused kernel.
SWIGLU_OF_STEPS = mx.compile(lambda gate, x: nn.silu(gate) * x)

_uses: Counter[tuple[Any, ...]] = Counter()
#: Padded shapes (B, H, L, D) of pictures' attention that have plans.
_filled: set[tuple[int, ...]] = set()
#: Results of ``once``, by function, array, thread and settings.
_made: dict[tuple[Any, ...], Any] = {}


def takes_plans(queries: mx.array) -> bool:
    """Whether MLX runs this attention through cuDNN."""
    is_half = queries.dtype in (mx.float16, mx.bfloat16)
    return is_half and queries.shape[-1] <= WIDEST and counts_launches()


def counts_launches() -> bool:
    """Whether launches dominate small operations, as on CUDA."""
    return mx.cuda.is_available() and mx.default_device() == mx.Device(mx.gpu)


def wants_fast_widths(dtype: mx.Dtype) -> bool:
    return dtype in (mx.float16, mx.bfloat16) and counts_launches()


def takes_powers(array: mx.array) -> bool:
    return array.dtype == mx.float32 and mx.default_device().type == mx.DeviceType.cpu


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any = None
) -> mx.array:
    """Compute ``mx.fast.scaled_dot_product_attention`` the fastest way."""
    call = current()
    if call.attends_apart and queries.shape[0] > 1:
        return attend_apart(queries, keys, values, scale, mask)
    if queries.shape[2] == 1 and counts_launches() and not call.is_fixed:
        found = one_query.attend_where_right(queries, keys, values, scale, mask)
        if found is not None:
            return found
    if is_groupable(queries, keys, mask) and (
        takes_plans(queries) or mask.shape[1] > 1
    ):
        return attend_groups(queries, keys, values, scale, mask)
    if takes_plans(queries):
        if (
            is_unfused(queries, keys, mask)
            if call.is_fixed
            else queries.shape[2] > 1 and is_rare(queries, keys)
        ):
            return attend_unfused(queries, keys, values, scale, mask)
        if (
            not call.is_fixed
            and isinstance(mask, str)
            and queries.shape[2] > 1
            and is_early(queries, keys)
        ):
            return attend_before(queries, keys, values, scale)
    elif takes_powers(queries):
        # a decode step's over a slab
        if isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[1:3] == (1, 1):
            mask = added(mask, queries.dtype)
            is_ours = queries.size // queries.shape[3] * keys.shape[2] > FEW_SCORES
        else:
            is_ours = not isinstance(mask, mx.array) and is_long(queries, keys)
        if is_ours and not by_numpy.takes_attention(queries, keys):
            return attend_in_blocks(queries, keys, values, scale, mask)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask
    )


def attend_all(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float
) -> mx.array:
    """Attend without a mask among a picture's patches (B, H, L, D)."""
    if (
        takes_plans(queries)
        and len(queries) > 1
        and keys.shape[2] > FEW_KEYS
        and not is_small(queries[:1], keys[:1])
    ):
        # Large pictures run one by one, so that one plan serves any number of them.
        rows = zip(queries[:, None], keys[:, None], values[:, None], strict=True)
        return mx.concatenate([attend_all(*row, scale) for row in rows])
    if takes_plans(queries):
        length = planned_length(queries.shape)
        if length is None:
            return attend_by_queries(queries, keys, values, scale)
        return attend_filled(queries, keys, values, length, scale)
    if takes_powers(queries):
        return attend(queries, keys, values, scale)
    return ensure_fused_sdpa(queries, keys, values, scale)


def planned_length(shape: tuple[int, ...]) -> int | None:
    """Count a shape (B, H, L, D); return its own or a padded length with a plan, or None."""
    batch, heads, length, width = shape
    filled = few_from(length, LENGTH_STEP) if length > FEW_KEYS else length
    few = (batch, heads, filled, width)
    if current().is_fixed:
        is_light = batch * heads * length**2 <= MAX_SCORES or length <= FEW_KEYS
        return None if is_light else filled
    is_own = not is_new(shape, times=FILLED_TIMES if few in _filled else 1)
    is_filled = not is_new(few, True)
    if is_own or not is_filled:
        return length if is_own else None
    _filled.add(few)
    return filled


def attend_filled(
    queries: mx.array, keys: mx.array, values: mx.array, length: int, scale: float
) -> mx.array:
    """Attend without a mask among (B, H, L, D), padded to ``length``."""
    batch, heads, own, width = queries.shape
    if own == length:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)
    # along the patches, in memory order
    fill = [(0, 0), (0, length - own), (0, 0), (0, 0)]
    parts = [mx.pad(part.swapaxes(1, 2), fill) for part in (queries, keys, values)]
    mask = None
    if width + FAST_WIDTH <= WIDEST:
        for at, columns in enumerate(columns_of(own, length, queries.dtype)):
            wide = mx.broadcast_to(columns, (batch, length, heads, FAST_WIDTH))
            parts[at] = mx.concatenate([parts[at], wide], axis=-1)
    else:
        mask = mask_of((own,) * batch, length, queries.dtype)
    queries, keys, values = (part.swapaxes(1, 2) for part in parts)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask
    )[:, :, :own]


@lru_cache(maxsize=32)
def columns_of(own: int, filled: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Return extra columns (1, L, 1, 8) of queries and keys that mask all but the first ``own`` keys.

    No MLX operation makes them, so any thread may use them.
    """
    queries, keys = np.zeros((2, 1, filled, 1, FAST_WIDTH), np.float32)
    queries[..., 0], keys[:, own:, :, 0] = 2.0**10, -(2.0**15)  # within float16's range
    return mx.array(queries, dtype), mx.array(keys, dtype)


@lru_cache(maxsize=256)
def mask_of(lengths: tuple[int, ...], filled: int, dtype: mx.Dtype) -> mx.array:
    """Mask keys beyond ``lengths`` (B,): additive (B, 1, 1, ``filled``), for any thread."""
    is_there = np.arange(filled) < np.array(lengths)[:, None]
    return mx.array(
        np.where(is_there, 0.0, mx.finfo(dtype).min).astype(np.float32)[:, None, None],
        dtype,
    )


def few_from(count: int, step: int) -> int:
    """Round up to a multiple of ``step``, or of an eighth of the power of two below."""
    return -few_to(-count, step)


def few_to(count: int, step: int) -> int:
    step = max(step, 1 << max(0, abs(count).bit_length() - 4))
    return count // step * step


def attend_apart(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
) -> mx.array:
    """Run ``attend`` for each row separately."""
    is_each = (
        isinstance(mask, mx.array)
        and mask.ndim == 4
        and mask.shape[0] == queries.shape[0]
    )
    with running(replace(current(), attends_apart=False)):
        rows = [
            attend(
                queries[i : i + 1],
                keys[i : i + 1],
                values[i : i + 1],
                scale,
                mask[i : i + 1] if is_each else mask,
            )
            for i in range(queries.shape[0])
        ]
    return mx.concatenate(rows)


def is_long(queries: mx.array, keys: mx.array) -> bool:
    _, heads, length, _ = queries.shape
    return length > 1 or heads > keys.shape[1] or keys.shape[2] >= MANY_KEYS


def is_small(queries: mx.array, keys: mx.array) -> bool:
    batch, heads, length, _ = queries.shape
    return batch * heads * length * keys.shape[2] <= MAX_SCORES


def is_unfused(queries: mx.array, keys: mx.array, mask: Any) -> bool:
    """Whether attention runs unfused, without a plan, by shapes alone.

    For one query without an array mask, MLX goes by the keys' layout (``use_cudnn_for_decoding``).
    """
    is_lone = queries.shape[2] == 1 and not isinstance(mask, mx.array)
    return is_lone or is_small(queries, keys)


def is_rare(queries: mx.array, keys: mx.array) -> bool:
    """Count a shape; return whether it is small and too rare for a plan."""
    return (
        is_small(queries, keys)
        and _count((queries.shape, keys.shape)) <= USES_BEFORE_PLAN
    )


def has_plans(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Count the first shape; return whether all of them have plans."""
    return current().is_fixed or not is_new(shapes[0], True, times=len(shapes))


def is_early(queries: mx.array, keys: mx.array) -> bool:
    """Count a prompt's shape; return whether it is too rare for a plan, which larger shapes get sooner."""
    uses = _count((queries.shape, keys.shape))
    batch, heads, length, _ = queries.shape
    scores = batch * heads * length * keys.shape[2]
    return (
        uses <= USES_BEFORE_PLAN
        and uses * scores <= NUMBERS_BEFORE_PLAN
        and scores <= MAX_PROMPT_SCORES
    )


def is_new(shape: tuple[int, ...], is_filled: bool = False, times: int = 1) -> bool:
    """Count a tower's shape (B, H, L, D); return whether it is too rare for a plan that pays ``times`` later."""
    batch, heads, length, width = shape
    numbers = batch * heads * length * (length + NUMBERS_OF_PATCH * width)
    uses = _count((shape, is_filled))
    return (
        uses <= times * USES_BEFORE_PLAN
        and uses * numbers <= times * NUMBERS_BEFORE_PLAN
    )


def _count(shape: tuple[Any, ...]) -> int:
    if len(_uses) > MAX_SHAPES:
        _uses.clear()
        _filled.clear()
    own = (this_thread(), shape)  # MLX keeps plans per thread
    _uses[own] += OFTEN if current().makes_plans else 1
    return _uses[own]


def attend_unfused(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
) -> mx.array:
    """Attend by products and a float32 softmax; ``mask`` is None, "causal" or an array."""
    batch, heads, length, width = queries.shape
    kv_heads, columns = keys.shape[1], keys.shape[2]
    grouped = (queries * scale).reshape(batch, kv_heads, -1, width)  # (B, H_kv, G L, D)
    scores = (grouped @ keys.swapaxes(-1, -2)).reshape(batch, heads, length, columns)
    if isinstance(mask, str):
        mask = _not_later(length, columns)
    if mask is not None:
        scores = (
            mx.where(mask, scores, mx.finfo(scores.dtype).min)
            if mask.dtype == mx.bool_
            else scores + mask
        )
    weights = mx.softmax(scores, axis=-1, precise=True).reshape(
        batch, kv_heads, -1, columns
    )
    return (weights @ values).reshape(batch, heads, length, -1)


def attend_by_queries(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float
) -> mx.array:
    batch, heads, length, _ = queries.shape
    size = max(1, BLOCK_SCORES // (batch * heads * keys.shape[2]))  # queries at a time
    parts = [
        attend_unfused(queries[:, :, start : start + size], keys, values, scale, None)
        for start in range(0, length, size)
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def attend_before(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float
) -> mx.array:
    batch, heads, length, _ = queries.shape
    columns = keys.shape[2]
    size = max(1, PROMPT_SCORES // (batch * heads * columns))  # queries at a time
    parts = []
    for start in range(0, length, size):
        seen = columns - length + min(start + size, length)
        some = queries[:, :, start : start + size]
        parts.append(
            attend_unfused(
                some, keys[:, :, :seen], values[:, :, :seen], scale, "causal"
            )
        )
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def is_groupable(queries: mx.array, keys: mx.array, mask: Any) -> bool:
    is_masked = (
        isinstance(mask, mx.array)
        and mask.ndim == 4
        and mask.shape[1] in (1, keys.shape[1])
    )
    return (
        is_masked
        and mask.shape[2] == queries.shape[2] == 1
        and queries.shape[1] > keys.shape[1]
    )


def attend_groups(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array
) -> mx.array:
    """Attend with queries (B, H, 1, D) and mask (B, 1 or H_kv, 1, K), grouped by shared keys."""
    batch, heads, _, width = queries.shape
    kv_heads, columns = keys.shape[1], keys.shape[2]
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads, width)
    wide = mx.broadcast_to(
        added(mask, queries.dtype), (batch, mask.shape[1], heads // kv_heads, columns)
    )
    attended = mx.fast.scaled_dot_product_attention(
        grouped, keys, values, scale=scale, mask=wide
    )
    return attended.reshape(batch, heads, 1, -1)


def added(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    """Convert a mask to an additive one, once per step."""
    return mask if mask.dtype != mx.bool_ else once(mask, _added, dtype)


def _added(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    return mx.where(mask, mx.array(0, dtype), mx.array(mx.finfo(dtype).min, dtype))


def once(array: mx.array, make: Callable[..., Any], *settings: Any) -> Any:
    """Return ``make(array, *settings)``, made once a thread while the array lives.

    Threads share arrays, such as ``lengths_array``, and cannot evaluate each other's results.
    """
    key = (make, id(array), this_thread(), *settings)
    if key not in _made:
        _made[key] = make(array, *settings)
        weakref.finalize(array, _made.pop, key, None).atexit = False
    return _made[key]


def attend_in_blocks(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
) -> mx.array:
    """Attend with ``BLOCK`` queries at a time; ``mask`` is None, "causal" or a slab's."""
    is_causal = mask is not None and not isinstance(mask, mx.array)
    batch, heads, length, width = queries.shape
    kv_heads, columns = keys.shape[1], keys.shape[2]
    queries, outputs = queries * scale, []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        seen = columns - length + stop if is_causal else columns
        # (B, H_kv, G l, D)
        block = queries[:, :, start:stop].reshape(batch, kv_heads, -1, width)
        scores = block @ keys[:, :, :seen].swapaxes(-1, -2)
        if is_causal:
            scores = (
                scores.reshape(batch, heads, stop - start, seen)
                + _later(stop - start, seen)
            ).reshape(scores.shape)
        elif isinstance(mask, mx.array):
            scores = scores + added(mask, scores.dtype)
        weights = mx.power(E, scores - scores.max(axis=-1, keepdims=True))
        attended = (weights @ values[:, :, :seen]) / weights.sum(axis=-1, keepdims=True)
        outputs.append(attended.reshape(batch, heads, stop - start, -1))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def takes_codes(queries: mx.array, keys: QuantizedStates, mask: Any) -> bool:
    is_plain = mask is None or isinstance(mask, str)
    is_shared = queries.shape[2] == 1 and queries.shape[1] >= FEW_HEADS * keys.shape[1]
    is_much = queries.size * keys.shape[2] >= MANY_CODES
    return (
        is_plain
        and is_shared
        and is_much
        and keys.layout.bits in CODES_OF_BYTES
        and takes_powers(queries)
    )


def attend_codes(
    queries: mx.array, keys: QuantizedStates, values: QuantizedStates, scale: float
) -> mx.array:
    """Attend with queries (B, H, 1, D) over packed keys and values: (B, H, 1, D_v).

    A number is ``code * scale + bias`` of its group. So scores are products with codes, scaled, plus biases times the
    query's sums. A query becomes a row per group, zero elsewhere.
    """
    batch, heads, _, depth = queries.shape
    kv_heads, size = keys.shape[1], keys.layout.group_size
    missing = [(0, 0)] * 3 + [(0, -depth % size)]  # pad the last group
    grouped = mx.pad(
        (queries * scale).reshape(batch, kv_heads, heads // kv_heads, depth), missing
    )
    # (B, G, R, n, g)
    grouped = grouped.reshape(batch, kv_heads, heads // kv_heads, -1, size)
    # (B, G, R, n, n, g)
    apart = grouped[..., None, :, :] * mx.eye(grouped.shape[3])[:, :, None]
    apart = apart.flatten(-2).flatten(2, 3)
    planes = _planes(keys)
    found: Any = sum(
        apart[..., i :: len(planes)] @ plane.swapaxes(-1, -2)
        for i, plane in enumerate(planes)
    )
    # (B, G, n, K)
    scales, biases = (
        numbers.swapaxes(-1, -2) for numbers in (keys.scales, keys.biases)
    )
    scores = (found.reshape(*grouped.shape[:4], -1) * scales[:, :, None]).sum(
        axis=3
    ) + grouped.sum(axis=-1) @ biases
    weights = mx.power(E, scores - scores.max(axis=-1, keepdims=True))
    attended = _weighted(values, weights) / weights.sum(axis=-1, keepdims=True)
    return attended[..., : values.layout.depth].reshape(batch, heads, 1, -1)


def _weighted(values: QuantizedStates, weights: mx.array) -> mx.array:
    """Sum packed values (B, G, K, D_v) by weights (B, G, R, K)."""
    batch, kv_heads, rows, columns = weights.shape
    scales = values.scales.swapaxes(-1, -2)  # (B, G, n, K)
    count = scales.shape[2]
    scaled = (weights[:, :, :, None] * scales[:, :, None]).reshape(
        batch, kv_heads, -1, columns
    )
    planes = [
        (scaled @ plane).reshape(batch, kv_heads, rows, count, count, -1)
        for plane in _planes(values)
    ]
    # each group by its own scales
    own = [(plane * mx.eye(count)[:, :, None]).sum(axis=3) for plane in planes]
    return (
        mx.stack(own, axis=-1).flatten(-2) + (weights @ values.biases)[..., None]
    ).flatten(-2)


def _planes(states: QuantizedStates) -> list[mx.array]:
    """Return float codes; with ``p`` a byte, array ``i`` holds numbers i, i + p, ..."""
    packed, bits = states.packed.view(mx.uint8), states.layout.bits
    parts = (
        [packed]
        if bits == 8
        else [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    )
    return [part.astype(mx.float32) for part in parts]


@lru_cache(maxsize=16)
def _not_later(queries: int, keys: int) -> mx.array:
    """Return the causal mask (l, K) of the last ``queries`` positions."""
    return mx.array(np.arange(keys)[None] <= np.arange(keys - queries, keys)[:, None])


@lru_cache(maxsize=64)
def _later(queries: int, keys: int) -> mx.array:
    is_later = np.arange(keys)[None] > np.arange(keys - queries, keys)[:, None]
    return mx.array(
        np.where(is_later, np.finfo(np.float32).min / 2, 0.0).astype(np.float32)
    )


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    gated = by_numpy.silu(gate)
    if gated is not None:
        return gated * x
    if takes_powers(gate):
        return gate * x / (1 + mx.power(E, -gate))
    # decode steps have few shapes to trace
    is_step = gate.ndim == 3 and gate.shape[1] == 1
    return (
        SWIGLU_OF_STEPS(gate, x) if is_step and counts_launches() else SWIGLU(gate, x)
    )


def turn_pairs(
    first: mx.array, second: mx.array, by_first: mx.array, by_second: mx.array
) -> mx.array:
    """Rotate pairs of numbers by broadcast factors."""
    turn = _turn_at_once if counts_launches() else _turn
    return turn(first, second, by_first, by_second)


def _turn(
    first: mx.array, second: mx.array, by_first: mx.array, by_second: mx.array
) -> mx.array:
    return (first * by_first + second * by_second).astype(first.dtype)


_turn_at_once = mx.compile(_turn, shapeless=True)
