"""Attention over TurboQuant's codes.

A rotation keeps products: the rotated query times a rotated key is the query times the key. So a step rotates its queries,
and its output back, and never a key or a value. Directions are looked up a block of columns at a time; norms scale scores
and weights, which are few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.masks import added
from vlm_batch.arrays import joined
from vlm_batch.caches import lookups
from vlm_batch.caches.turbo import TurboStates
from vlm_batch.runtime import exponentials
from vlm_batch.runtime.exponentials import view

#: The most numbers of keys or values that a step looks up at a time, on a GPU.
BLOCK = 2**24
#: Attention over arrays: (queries, keys, values, scale, mask) -> output.
Attend = Callable[[mx.array, mx.array, mx.array, float, Any], mx.array]


def attend_prompt(
    attend: Attend,
    queries: mx.array,
    keys: TurboStates,
    values: TurboStates,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """Attend with several queries (B, H, L, D), which share one look-up of all keys and values."""
    dtype = queries.dtype
    turned = keys.layout.rotated(queries).astype(dtype)
    wide_keys, wide_values = (
        states.rotated().astype(dtype) for states in (keys, values)
    )
    if sinks is None:
        output = attend(turned, wide_keys, wide_values, scale, mask)
    else:
        output = mx.fast.scaled_dot_product_attention(
            turned, wide_keys, wide_values, scale=scale, mask=mask, sinks=sinks
        )
    return values.layout.restored(output.astype(mx.float32)).astype(dtype)


def attend_apart(
    attend: Callable[..., mx.array],
    queries: mx.array,
    keys: TurboStates,
    values: TurboStates,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """Attend with each row's queries separately."""
    has_rows = isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[0] > 1
    rows: list[mx.array] = []
    for row in range(queries.shape[0]):
        own = slice(row, row + 1)
        seen = mask[own] if has_rows else mask
        states = (keys.of_row(row), values.of_row(row))
        rows.append(attend(queries[own], *states, scale, seen, sinks))
    return mx.concatenate(rows)


def attend_step(
    queries: mx.array,
    keys: TurboStates,
    values: TurboStates,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """Attend with one query a row (B, H, 1, D).

    Args:
        mask: for (B, H, 1, K), bool (True attends) or additive; None and "causal" hide nothing.
        sinks: (H,) scores that take weight and have no value.
    """
    batch, heads, _, depth = queries.shape
    groups = keys.shape[1]
    # heads that share keys become rows: (B, G, R, D)
    grouped = queries.astype(mx.float32) * scale
    grouped = grouped.reshape(batch, groups, heads // groups, depth)
    turned = keys.layout.rotated(grouped)
    mask = _by_group(mask, groups, heads) if isinstance(mask, mx.array) else None
    if sinks is not None:
        sinks = sinks.astype(mx.float32).reshape(1, groups, heads // groups, 1)
    output = _by_numpy(turned, keys, values, mask, sinks)
    if output is None:
        output = _by_blocks(turned, keys, values, mask, sinks, queries.dtype)
    restored = values.layout.restored(output)
    return restored.reshape(batch, heads, 1, -1).astype(queries.dtype)


def _by_group(mask: mx.array, groups: int, heads: int) -> mx.array:
    """Return a mask of (B, H, 1, K) for scores (B, G, R, K)."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if mask.shape[1] == 1:
        return mask
    return mask.reshape(mask.shape[0], groups, heads // groups, mask.shape[3])


# By operations of MLX -------------------------------------------------------------------------------------------------


def _by_blocks(
    queries: mx.array,
    keys: TurboStates,
    values: TurboStates,
    mask: mx.array | None,
    sinks: mx.array | None,
    dtype: mx.Dtype,
) -> mx.array:
    """Attend with rotated queries (B, G, R, D), by products in ``dtype``: rotated (B, G, R, D_v)."""
    found = [
        queries.astype(dtype)
        @ keys.between(begin, end).directions().astype(dtype).swapaxes(-1, -2)
        for begin, end in _blocks(keys)
    ]
    scores = joined(found, axis=3).astype(mx.float32) * _row_of(keys.norms)
    if mask is not None:
        scores = scores + added(mask, mx.float32)
    weights = _softmax(scores, sinks) * _row_of(values.norms)
    total: Any = 0
    for begin, end in _blocks(values):
        block = values.between(begin, end).directions().astype(dtype)
        part = weights[..., begin:end].astype(dtype) @ block
        total = total + part.astype(mx.float32)
    return total  # type: ignore[no-any-return]


def _row_of(norms: mx.array) -> mx.array:
    """Return norms (B, G, K, 1) beside scores (B, G, R, K)."""
    return norms.astype(mx.float32).swapaxes(-1, -2)


def _softmax(scores: mx.array, sinks: mx.array | None) -> mx.array:
    """Return the weights (B, G, R, K) of scores."""
    if sinks is None:
        return mx.softmax(scores, axis=-1)
    column = mx.broadcast_to(sinks, (*scores.shape[:3], 1))
    with_sinks = mx.concatenate([scores, column], axis=-1)
    return mx.softmax(with_sinks, axis=-1)[..., :-1]


def _blocks(states: TurboStates) -> Iterator[tuple[int, int]]:
    """Yield [begin, end) of blocks of columns."""
    batch, groups, columns, depth = states.shape
    step = max(1, BLOCK // (batch * groups * depth))
    for begin in range(0, columns, step):
        yield begin, min(begin + step, columns)


# By numpy, on a CPU ----------------------------------------------------------------------------------------------------


def _by_numpy(
    queries: mx.array,
    keys: TurboStates,
    values: TurboStates,
    mask: mx.array | None,
    sinks: mx.array | None,
) -> mx.array | None:
    """Do what ``_by_blocks`` does, row by row in one evaluation, with codes looked up by numpy.

    None on a GPU, and while MLX traces. A row's numbers depend on that row alone.
    """
    if not lookups.is_numpys():
        return None
    given = [one for one in (mask, sinks) if one is not None]
    if not exponentials.evaluated(queries, *keys.parts, *values.parts, *given):
        return None
    added_mask = None if mask is None else _numbers(mask)
    extra = None if sinks is None else view(sinks)[0]
    rows = []
    with np.errstate(all="ignore"):
        for row in range(queries.shape[0]):
            own = None
            if added_mask is not None:
                own = added_mask[min(row, len(added_mask) - 1)]
            states = (keys.of_row(row), values.of_row(row))
            rows.append(_attend_row(queries[row], *states, own, extra))
    return mx.stack(rows)


def _numbers(mask: mx.array) -> np.ndarray:
    """Return a mask as numbers to add (B, G, R, K)."""
    if mask.dtype != mx.bool_:
        return np.array(mask.astype(mx.float32))
    hidden = np.finfo(np.float32).min
    return np.where(np.array(mask), np.float32(0), hidden)


def _attend_row(
    queries: mx.array,
    keys: TurboStates,
    values: TurboStates,
    mask: np.ndarray | None,
    sinks: np.ndarray | None,
) -> mx.array:
    """Attend with one row's rotated queries (G, R, D): rotated (G, R, D_v). ``mask``: (G, R, K)."""
    end = keys.shape[2]
    if mask is not None:
        end = _end(mask)
    scores = _scores(queries, keys.between(0, end))
    if mask is not None:
        scores += mask[..., :end]
    highest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        highest = np.maximum(highest, sinks)
    scores -= highest
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks - highest)
    scores *= _beside(values.norms)[..., :end]
    scores /= total
    return _sums(mx.array(scores), values.between(0, end))


def _end(mask: np.ndarray) -> int:
    """Return how many columns any head sees, up to the last."""
    hidden = np.finfo(np.float32).min / 2
    columns = np.nonzero((mask > hidden).reshape(-1, mask.shape[-1]).any(axis=0))[0]
    return int(columns[-1]) + 1 if columns.size else 1


def _beside(norms: mx.array) -> np.ndarray:
    """Return a row's norms (1, G, K, 1) beside scores (G, R, K)."""
    found: np.ndarray = view(norms)[0, :, None, :, 0].astype(np.float32)
    return found


def _scores(queries: mx.array, keys: TurboStates) -> np.ndarray:
    """Return the products (G, R, K) of a row's queries with its keys."""
    layout, columns = keys.layout, keys.shape[2]
    missing = lookups.filled_depth(*layout.coding) - layout.depth
    if missing:
        queries = mx.pad(queries, [(0, 0), (0, 0), (0, missing)])
    words = view(keys.codes)[0]
    scores = np.empty((*queries.shape[:2], columns), np.float32)
    step = lookups.block_columns(*layout.coding, len(words))
    for begin in range(0, columns, step):
        own = slice(begin, begin + step)
        found = queries @ lookups.block(words[:, own], *layout.coding).swapaxes(-1, -2)
        mx.eval(found)
        scores[..., own] = view(found)
    scores *= _beside(keys.norms)
    return scores


def _sums(weights: mx.array, values: TurboStates) -> mx.array:
    """Return the sums (G, R, D_v) of a row's values by weights (G, R, K)."""
    layout = values.layout
    words = view(values.codes)[0]
    total: Any = 0
    step = lookups.block_columns(*layout.coding, len(words))
    for begin in range(0, values.shape[2], step):
        own = slice(begin, begin + step)
        found = weights[..., own] @ lookups.block(words[:, own], *layout.coding)
        mx.eval(found)
        total = total + view(found)
    return mx.array(total[..., : layout.depth])
