"""Attention and activations by the fastest operations of each device, with the same results (docs/benchmarks.md).

On a CPU, an exponential or a selection by a mask costs MLX 0.32 more than a power of C's library, and far more than a
product. So causal attention goes block by block of queries, over no more keys than a block can see, with a mask that is
added and powers of e. The queries of one group of heads are rows of one product, which packs their keys once; MLX
multiplies head by head. This is for float32 only, as all fast operations there.
MLX's product of packed numbers takes longer than to turn their codes into floats and multiply those, where several heads
share them; scales and biases are then applied to the scores.

On CUDA, MLX 0.32 runs half-precision attention through cuDNN, which makes a plan for every new shape of queries and keys,
strides included (mlx/backend/cuda/scaled_dot_product_attention.cpp, ``build_sdpa_cache_key``). Prompts are of all
lengths, so a shape gets a plan here when it keeps coming back, in a warm-up, or if its scores would take too much memory.
Until then its attention is computed by products and a softmax. The choice thus depends on earlier calls, and so do the last
bits in half precision. An adapter that goes by shapes alone computes all small attention by products. Pictures' patches and
windows are filled up to few shapes, behind a mask, so that those of many sizes share plans. A single query with an array as
mask has no kernel there, but several queries have: so the queries of one group of heads are taken as several queries.
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

from vlm_batch.adapters.hooks import current, running, this_thread
from vlm_batch.caches.quantized import QuantizedStates

#: Calls of a shape before it is given a plan: in about 30 forwards of 36 layers a plan pays for itself.
USES_BEFORE_PLAN = 1024
#: Uses after which every shape has its plan.
OFTEN = 2**32
#: Scores (B, H, L, K) up to which attention with any mask is spelled out at first: a step's layers are launched before their
#: memory comes back.
MAX_SCORES = 2**22
MAX_SHAPES = 8192
#: Numbers in all after which a shape of a tower's attention is given a plan: scores, and each of a patch's so many times.
#: Spelled out, each is written and read twice; a plan takes as long as so many of them.
NUMBERS_BEFORE_PLAN = 2**33
NUMBERS_OF_PATCH = 6
#: Times later that a picture's own length pays for a plan where it is filled up to one: so much less is lost by then.
FILLED_TIMES = 6
#: Least difference of lengths that pictures' patches are filled up to, and of numbers of windows.
LENGTH_STEP = 64
WINDOWS_STEP = 16
#: Scores of a tower that are there at a time where they are spelled out, in elements.
BLOCK_SCORES = 2**26
#: Scores of a prompt that are computed at a time where they are spelled out, in elements.
PROMPT_SCORES = 2**23
#: The most scores of a prompt that are spelled out, in parts: what is launched of ten layers takes some 4 GB then.
MAX_PROMPT_SCORES = 2**26
#: Keys up to which scores take about as much memory as queries do, however many windows there are.
FEW_KEYS = 128

#: Rows of 16 bytes, which the fast kernels of half-precision products read: docs/benchmarks.md, pictures.
FAST_WIDTH = 8
#: The widest heads that cuDNN's attention takes.
WIDEST = 128

#: Queries of a block on a CPU.
BLOCK = 64
#: From how many keys on a single query pays for the further operations of powers, where no heads share keys
#: (docs/benchmarks.md).
MANY_KEYS = 512
E = math.e
#: Bits of which a byte holds whole codes.
CODES_OF_BYTES = (2, 4, 8)
#: Heads that share keys, from which on their codes are worth it.
FEW_HEADS = 4
#: Numbers that the heads read in all, from which on that pays for the further operations.
MANY_CODES = 2**20

#: mlx-vlm's, whatever its name is bound to later.
SWIGLU = activations.swiglu
#: The same by the kernel that a compiled decode step has for it: MLX names kernels by what is fused, and builds each once.
SWIGLU_OF_STEPS = mx.compile(lambda gate, x: nn.silu(gate) * x)

_uses: Counter[tuple[Any, ...]] = Counter()
#: Shapes (B, H, L, D) that pictures' attention has been filled up to.
_filled: set[tuple[int, ...]] = set()
#: Answers of ``once``, by what made them of which array.
_made: dict[tuple[Any, ...], Any] = {}


def takes_plans(queries: mx.array) -> bool:
    """True if MLX would run this attention through cuDNN."""
    is_half = queries.dtype in (mx.float16, mx.bfloat16)
    return is_half and queries.shape[-1] <= WIDEST and counts_launches()


def counts_launches() -> bool:
    """True if a small operation costs its launch, and not its work: MLX's CUDA back end."""
    return mx.cuda.is_available() and mx.default_device() == mx.Device(mx.gpu)


def wants_fast_widths(dtype: mx.Dtype) -> bool:
    """True if products of this type are slow where a width is no multiple of ``FAST_WIDTH``: on CUDA, cuBLAS's."""
    return dtype in (mx.float16, mx.bfloat16) and counts_launches()


def takes_powers(array: mx.array) -> bool:
    """True if this is computed where powers are cheaper than exponentials."""
    return array.dtype == mx.float32 and mx.default_device().type == mx.DeviceType.cpu


def attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any = None) -> mx.array:
    """``mx.fast.scaled_dot_product_attention`` of (B, H, L, D) queries over (B, H_kv, K, D) keys, by the cheaper way."""
    call = current()
    if call.attends_apart and queries.shape[0] > 1:
        return attend_apart(queries, keys, values, scale, mask)
    if takes_plans(queries):
        if is_groupable(queries, keys, mask):
            return attend_groups(queries, keys, values, scale, mask)
        if spells_out(queries, keys, mask) if call.is_fixed else queries.shape[2] > 1 and is_rare(queries, keys):
            return attend_spelled_out(queries, keys, values, scale, mask)
        if not call.is_fixed and isinstance(mask, str) and queries.shape[2] > 1 and is_early(queries, keys):
            return attend_before(queries, keys, values, scale)
    elif (mask is None or isinstance(mask, str)) and takes_powers(queries) and is_long(queries, keys):
        return attend_in_blocks(queries, keys, values, scale, is_causal=mask is not None)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def attend_all(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """``attend`` of a picture's patches to each other, for towers: pictures are of many sizes, and heads of widths that Metal
    has no kernel for. Where shapes have plans, long ones are filled up to few lengths."""
    if takes_plans(queries) and len(queries) > 1 and keys.shape[2] > FEW_KEYS and not is_small(queries[:1], keys[:1]):
        # Large pictures one by one: a plan then holds for any number of them.
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
    """Count a shape (B, H, L, D) of pictures' attention. Returns the length by whose plan it is computed, its own or one that
    it is filled up to; None if it is spelled out."""
    batch, heads, length, width = shape
    filled = few_from(length, LENGTH_STEP) if length > FEW_KEYS else length
    few = (batch, heads, filled, width)
    if current().is_fixed:
        is_light = batch * heads * length**2 <= MAX_SCORES or length <= FEW_KEYS
        return None if is_light else filled
    is_own, is_filled = not is_new(shape, times=FILLED_TIMES if few in _filled else 1), not is_new(few, True)
    if is_own or not is_filled:
        return length if is_own else None
    _filled.add(few)
    return filled


def attend_filled(queries: mx.array, keys: mx.array, values: mx.array, length: int, scale: float) -> mx.array:
    """Attention of (B, H, L, D) with each other by the plan of a ``length`` that is no less: (B, H, L, D)."""
    batch, heads, own, width = queries.shape
    if own == length:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)
    fill = [(0, 0), (0, length - own), (0, 0), (0, 0)]  # patch by patch, as they lie in memory
    parts, mask = [mx.pad(part.swapaxes(1, 2), fill) for part in (queries, keys, values)], None
    if width + FAST_WIDTH <= WIDEST:
        for at, columns in enumerate(columns_of(own, length, queries.dtype)):
            wide = mx.broadcast_to(columns, (batch, length, heads, FAST_WIDTH))
            parts[at] = mx.concatenate([parts[at], wide], axis=-1)
    else:
        mask = mask_of((own,) * batch, length, queries.dtype)
    queries, keys, values = (part.swapaxes(1, 2) for part in parts)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)[:, :, :own]


@lru_cache(maxsize=32)
def columns_of(own: int, filled: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Further columns (1, L, 1, 8) of queries and of keys, whose product is 0 for the first ``own`` keys and very low for those
    that only fill up: a mask at no cost. They are made without an operation, so that any thread may use them."""
    queries, keys = np.zeros((2, 1, filled, 1, FAST_WIDTH), np.float32)
    queries[..., 0], keys[:, own:, :, 0] = 2.0**10, -(2.0**15)  # which float16 has, too
    return mx.array(queries, dtype), mx.array(keys, dtype)


@lru_cache(maxsize=256)
def mask_of(lengths: tuple[int, ...], filled: int, dtype: mx.Dtype) -> mx.array:
    """The mask (B, 1, 1, ``filled``) that is added to scores of keys of which the first ``lengths`` (B,) are there. It is made
    without an operation, so that any thread may use it."""
    is_there = np.arange(filled) < np.array(lengths)[:, None]
    return mx.array(np.where(is_there, 0.0, mx.finfo(dtype).min).astype(np.float32)[:, None, None], dtype)


def few_from(count: int, step: int) -> int:
    """The least of few numbers that is not below: multiples of ``step``, and of an eighth of the power of two below them."""
    return -few_to(-count, step)


def few_to(count: int, step: int) -> int:
    """The greatest of these numbers that is not above."""
    step = max(step, 1 << max(0, abs(count).bit_length() - 4))
    return count // step * step


def attend_apart(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any) -> mx.array:
    """``attend`` for each row by itself, in the shapes that the row has alone: (B, H, L, D_v)."""
    is_each = isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[0] == queries.shape[0]
    with running(replace(current(), attends_apart=False)):
        rows = [
            attend(queries[i : i + 1], keys[i : i + 1], values[i : i + 1], scale, mask[i : i + 1] if is_each else mask)
            for i in range(queries.shape[0])
        ]
    return mx.concatenate(rows)


def is_long(queries: mx.array, keys: mx.array) -> bool:
    """True if attention on a CPU is enough work to be spelled out: several queries a head, or of a group, or many keys."""
    _, heads, length, _ = queries.shape
    return length > 1 or heads > keys.shape[1] or keys.shape[2] >= MANY_KEYS


def is_small(queries: mx.array, keys: mx.array) -> bool:
    """True if attention can do without a plan."""
    batch, heads, length, _ = queries.shape
    return batch * heads * length * keys.shape[2] <= MAX_SCORES


def spells_out(queries: mx.array, keys: mx.array, mask: Any) -> bool:
    """The choice by shapes alone: what is small, and a lone query without an array as mask, for which MLX goes by how its
    keys lie in memory (``use_cudnn_for_decoding``)."""
    is_lone = queries.shape[2] == 1 and not isinstance(mask, mx.array)
    return is_lone or is_small(queries, keys)


def is_rare(queries: mx.array, keys: mx.array) -> bool:
    """Count a shape. True if it has come too seldom for a plan, and is small enough to do without."""
    return is_small(queries, keys) and _count((queries.shape, keys.shape)) <= USES_BEFORE_PLAN


def has_plans(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Count the first of the shapes of attention calls that are made together. True if they are made by plans: it has come
    often enough for those of all, or shapes alone decide."""
    return current().is_fixed or not is_new(shapes[0], True, times=len(shapes))


def is_early(queries: mx.array, keys: mx.array) -> bool:
    """Count a shape of a prompt's attention. True if it has come too seldom for a plan: the larger, the sooner one pays. The
    largest have one at once, since parts are launched before the memory of those before comes back."""
    uses = _count((queries.shape, keys.shape))
    batch, heads, length, _ = queries.shape
    scores = batch * heads * length * keys.shape[2]
    return uses <= USES_BEFORE_PLAN and uses * scores <= NUMBERS_BEFORE_PLAN and scores <= MAX_PROMPT_SCORES


def is_new(shape: tuple[int, ...], is_filled: bool = False, times: int = 1) -> bool:
    """Count a shape (B, H, L, D) of a tower's attention. True if it has come too seldom for a plan, whatever its size: the
    larger, the sooner a plan pays. ``times`` is how many times later it pays than one that saves what spelling out costs."""
    batch, heads, length, width = shape
    numbers = batch * heads * length * (length + NUMBERS_OF_PATCH * width)
    uses = _count((shape, is_filled))
    return uses <= times * USES_BEFORE_PLAN and uses * numbers <= times * NUMBERS_BEFORE_PLAN


def _count(shape: tuple[Any, ...]) -> int:
    if len(_uses) > MAX_SHAPES:
        _uses.clear()
        _filled.clear()
    own = (this_thread(), shape)  # as MLX keeps plans
    _uses[own] += OFTEN if current().makes_plans else 1
    return _uses[own]


def attend_spelled_out(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any) -> mx.array:
    """Attention as products and a softmax in float32: (B, H, L, D_v). ``mask`` is None, "causal", or an array."""
    batch, heads, length, width = queries.shape
    kv_heads, columns = keys.shape[1], keys.shape[2]
    grouped = (queries * scale).reshape(
        batch, kv_heads, -1, width
    )  # a group's heads one after another: (B, H_kv, G L, D)
    scores = (grouped @ keys.swapaxes(-1, -2)).reshape(batch, heads, length, columns)
    if isinstance(mask, str):
        mask = _not_later(length, columns)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min) if mask.dtype == mx.bool_ else scores + mask
    weights = mx.softmax(scores, axis=-1, precise=True).reshape(batch, kv_heads, -1, columns)
    return (weights @ values).reshape(batch, heads, length, -1)


def attend_by_queries(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Spelled out without a mask, as many queries (B, H, L, D) at a time as keep the scores within ``BLOCK_SCORES``."""
    batch, heads, length, _ = queries.shape
    size = max(1, BLOCK_SCORES // (batch * heads * keys.shape[2]))
    parts = [
        attend_spelled_out(queries[:, :, start : start + size], keys, values, scale, None)
        for start in range(0, length, size)
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def attend_before(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Causal attention spelled out, as many queries (B, H, L, D) at a time as keep the scores within ``PROMPT_SCORES``, over
    the keys that they can see."""
    batch, heads, length, _ = queries.shape
    columns = keys.shape[2]
    size = max(1, PROMPT_SCORES // (batch * heads * columns))
    parts = []
    for start in range(0, length, size):
        seen = columns - length + min(start + size, length)
        some = queries[:, :, start : start + size]
        parts.append(attend_spelled_out(some, keys[:, :, :seen], values[:, :, :seen], scale, "causal"))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def is_groupable(queries: mx.array, keys: mx.array, mask: Any) -> bool:
    """True for one query a row, with a mask that is the same for all heads, where several heads share their keys."""
    is_masked = isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[1:3] == (1, 1)
    return is_masked and queries.shape[2] == 1 and queries.shape[1] > keys.shape[1]


def attend_groups(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array) -> mx.array:
    """One query a row (B, H, 1, D) with a mask (B, 1, 1, K): the heads that share keys become queries of one head."""
    batch, heads, _, width = queries.shape
    kv_heads, columns = keys.shape[1], keys.shape[2]
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads, width)
    wide = mx.broadcast_to(added(mask, queries.dtype), (batch, 1, heads // kv_heads, columns))
    attended = mx.fast.scaled_dot_product_attention(grouped, keys, values, scale=scale, mask=wide)
    return attended.reshape(batch, heads, 1, -1)


def added(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    """A mask as what is added to scores; made once for the layers of a step, which share their mask."""
    return mask if mask.dtype != mx.bool_ else once(mask, _added, dtype)


def _added(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    return mx.where(mask, mx.array(0, dtype), mx.array(mx.finfo(dtype).min, dtype))


def once(array: mx.array, make: Callable[..., Any], *settings: Any) -> Any:
    """The answer of ``make`` to an array, made once for as long as the array is there: layers share their masks and angles."""
    key = (make, id(array), *settings)
    if key not in _made:
        _made[key] = make(array, *settings)
        weakref.finalize(array, _made.pop, key, None).atexit = False
    return _made[key]


def attend_in_blocks(queries: mx.array, keys: mx.array, values: mx.array, scale: float, *, is_causal: bool) -> mx.array:
    """Attention of (B, H, L, D) queries, ``BLOCK`` at a time, over the keys that they can see: (B, H, L, D_v)."""
    batch, heads, length, width = queries.shape
    kv_heads, columns = keys.shape[1], keys.shape[2]
    queries, outputs = queries * scale, []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        seen = columns - length + stop if is_causal else columns
        block = queries[:, :, start:stop].reshape(batch, kv_heads, -1, width)  # (B, H_kv, G l, D)
        scores = block @ keys[:, :, :seen].swapaxes(-1, -2)
        if is_causal:
            scores = (scores.reshape(batch, heads, stop - start, seen) + _later(stop - start, seen)).reshape(
                scores.shape
            )
        weights = mx.power(E, scores - scores.max(axis=-1, keepdims=True))
        attended = (weights @ values[:, :, :seen]) / weights.sum(axis=-1, keepdims=True)
        outputs.append(attended.reshape(batch, heads, stop - start, -1))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def takes_codes(queries: mx.array, keys: QuantizedStates, mask: Any) -> bool:
    """True for one query a row over packed keys that are cheaper as floats of their codes, all of which it sees."""
    is_plain = mask is None or isinstance(mask, str)
    is_shared = queries.shape[2] == 1 and queries.shape[1] >= FEW_HEADS * keys.shape[1]
    is_much = queries.size * keys.shape[2] >= MANY_CODES
    return is_plain and is_shared and is_much and keys.layout.bits in CODES_OF_BYTES and takes_powers(queries)


def attend_codes(queries: mx.array, keys: QuantizedStates, values: QuantizedStates, scale: float) -> mx.array:
    """Attention of one query a row (B, H, 1, D) over packed keys and values, by the codes: (B, H, 1, D_v).

    A number is ``code * scale + bias`` in its group, so a score is a product with the codes of each group, scaled, and a
    bias for the sum of the query's group. A query is as many rows of one product as it has groups, zero but in its own.
    """
    batch, heads, _, depth = queries.shape
    kv_heads, size = keys.shape[1], keys.layout.group_size
    missing = [(0, 0)] * 3 + [(0, -depth % size)]  # the last group is filled with zeros
    grouped = mx.pad((queries * scale).reshape(batch, kv_heads, heads // kv_heads, depth), missing)
    grouped = grouped.reshape(batch, kv_heads, heads // kv_heads, -1, size)  # (B, G, R, n, g)
    apart = grouped[..., None, :, :] * mx.eye(grouped.shape[3])[:, :, None]  # (B, G, R, n, n, g)
    apart = apart.flatten(-2).flatten(2, 3)
    planes = _planes(keys)
    found: Any = sum(apart[..., i :: len(planes)] @ plane.swapaxes(-1, -2) for i, plane in enumerate(planes))
    scales, biases = (numbers.swapaxes(-1, -2) for numbers in (keys.scales, keys.biases))  # (B, G, n, K)
    scores = (found.reshape(*grouped.shape[:4], -1) * scales[:, :, None]).sum(axis=3) + grouped.sum(axis=-1) @ biases
    weights = mx.power(E, scores - scores.max(axis=-1, keepdims=True))
    attended = _weighted(values, weights) / weights.sum(axis=-1, keepdims=True)
    return attended[..., : values.layout.depth].reshape(batch, heads, 1, -1)


def _weighted(values: QuantizedStates, weights: mx.array) -> mx.array:
    """The sum of packed values (B, G, K, D_v) by weights (B, G, R, K): (B, G, R, D_v)."""
    batch, kv_heads, rows, columns = weights.shape
    scales = values.scales.swapaxes(-1, -2)  # (B, G, n, K)
    count = scales.shape[2]
    scaled = (weights[:, :, :, None] * scales[:, :, None]).reshape(batch, kv_heads, -1, columns)
    planes = [(scaled @ plane).reshape(batch, kv_heads, rows, count, count, -1) for plane in _planes(values)]
    own = [(plane * mx.eye(count)[:, :, None]).sum(axis=3) for plane in planes]  # a group's by its own scales
    return (mx.stack(own, axis=-1).flatten(-2) + (weights @ values.biases)[..., None]).flatten(-2)


def _planes(states: QuantizedStates) -> list[mx.array]:
    """The codes as floats: of ``p`` codes a byte, array ``i`` has those of the numbers i, i + p, ..."""
    packed, bits = states.packed.view(mx.uint8), states.layout.bits
    parts = [packed] if bits == 8 else [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return [part.astype(mx.float32) for part in parts]


@lru_cache(maxsize=16)
def _not_later(queries: int, keys: int) -> mx.array:
    """The causal mask of the last ``queries`` of ``keys`` positions: (l, K) bool. Made once for the layers of a forward, in no
    operation of the device."""
    return mx.array(np.arange(keys)[None] <= np.arange(keys - queries, keys)[:, None])


@lru_cache(maxsize=64)
def _later(queries: int, keys: int) -> mx.array:
    """The additive causal mask of the last ``queries`` of ``keys`` positions: (l, K), very low where a key comes later."""
    is_later = np.arange(keys)[None] > np.arange(keys - queries, keys)[:, None]
    return mx.array(np.where(is_later, np.finfo(np.float32).min / 2, 0.0).astype(np.float32))


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """``silu(gate) * x``."""
    if takes_powers(gate):
        return gate * x / (1 + mx.power(E, -gate))
    is_step = gate.ndim == 3 and gate.shape[1] == 1  # of few shapes, for each of which it is traced
    return SWIGLU_OF_STEPS(gate, x) if is_step and counts_launches() else SWIGLU(gate, x)


def turn_pairs(first: mx.array, second: mx.array, by_first: mx.array, by_second: mx.array) -> mx.array:
    """Rotary embedding of pairs of numbers by factors of both, which broadcast: one kernel where launches count."""
    turn = _turn_at_once if counts_launches() else _turn
    return turn(first, second, by_first, by_second)


def _turn(first: mx.array, second: mx.array, by_first: mx.array, by_second: mx.array) -> mx.array:
    return (first * by_first + second * by_second).astype(first.dtype)


_turn_at_once = mx.compile(_turn, shapeless=True)
