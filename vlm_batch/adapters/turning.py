"""Attention over TurboQuant's codes.

A rotation keeps products: the rotated query times a rotated key is the query times the key. So a step rotates its queries,
and its output back, and never a key or a value. Directions are looked up a block of columns at a time; norms scale scores
and weights, which are few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias, cast

import mlx.core as mx
import numpy as np
from mlx_vlm.turboquant import (
    TurboQuantKVCache,
    TurboQuantMSEState,
    _TurboQuantMSECodec,
)

from vlm_batch.adapters.masks import added
from vlm_batch.arrays import joined
from vlm_batch.caches import lookups
from vlm_batch.caches.rows import RowStates
from vlm_batch.caches.turbo import TurboLayout, TurboStates, cannot
from vlm_batch.runtime import exponentials
from vlm_batch.runtime.device import Device, device
from vlm_batch.runtime.exponentials import view

#: The most numbers of keys or values that a step looks up at a time, on a GPU.
BLOCK = 2**24
#: OpenBLAS multiplies without packing where a product has so few numbers, on a CPU.
PRODUCT = 1024
#: The fewest columns of a block on a CPU.
FEWEST_COLUMNS = 64
#: What a mask adds to hidden scores.
HIDDEN = np.finfo(np.float32).min
#: One row's keys and values.
Pair: TypeAlias = tuple[TurboStates, TurboStates]
#: Attention over arrays: (queries, keys, values, scale=, mask=) -> output.
Attend: TypeAlias = Callable[..., mx.array]


class Kernels(NamedTuple):
    """A device's kernels. Each returns None where it cannot, and operations do it."""

    #: Attends with one query a row: (queries (B, H, 1, D), keys, values, scale, mask).
    attend: Callable[..., mx.array | None] = cannot
    #: Looks up keys and values (B, H, L, D) and turns them back: (keys, values, dtype).
    restore: Callable[..., list[mx.array] | None] = cannot


OPERATIONS = Kernels()


class TurnedAttention(NamedTuple):
    """Arguments of attention over codes, as ``attention`` has them."""

    queries: mx.array  # (B, H, L, D)
    keys: TurboStates
    values: TurboStates
    scale: float
    #: For (B, H, L, K), bool (True attends) or additive; None and "causal" hide nothing of a step.
    mask: Any
    sinks: mx.array | None  # (H,) scores that take weight and have no value

    def rows(self) -> Iterator[TurnedAttention]:
        """Yield each row's."""
        mask = self.mask
        has_rows = isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[0] > 1
        for row in range(self.queries.shape[0]):
            own = slice(row, row + 1)
            yield TurnedAttention(
                self.queries[own],
                self.keys.of_row(row),
                self.values.of_row(row),
                self.scale,
                mask[own] if has_rows else mask,
                self.sinks,
            )

    @property
    def groups(self) -> tuple[int, int]:
        """Heads of keys, and heads of queries that share one."""
        heads, groups = self.queries.shape[1], self.keys.shape[1]
        return groups, heads // groups

    def turned(self) -> mx.array:
        """Return one scaled query a row, rotated as keys are. Heads that share keys become rows: (B, G, R, D)."""
        batch, _, _, depth = self.queries.shape
        apart = self.queries.reshape(batch, *self.groups, depth)
        return self.keys.layout.rotated(apart, self.scale)

    def turned_back(self, output: mx.array) -> mx.array:
        """Return the output (B, G, R, D_v) of one query a row as it is without a rotation: (B, H, 1, D_v)."""
        batch, heads, _, _ = self.queries.shape
        restored = self.values.layout.restored(output)
        return restored.reshape(batch, heads, 1, -1).astype(self.queries.dtype)

    def by_group(self) -> mx.array | None:
        """Return the mask for one query a row, for scores (B, G, R, K)."""
        mask = self.mask
        if not isinstance(mask, mx.array):
            return None
        if mask.ndim < 4:
            mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        if mask.shape[1] == 1:
            return mask  # the same for all layers, which make numbers of it once
        return mask.reshape(mask.shape[0], *self.groups, mask.shape[3])

    def sinks_by_group(self) -> mx.array | None:
        """Return sinks (1, G, R, 1) beside scores (B, G, R, K)."""
        if self.sinks is None:
            return None
        return self.sinks.astype(mx.float32).reshape(1, *self.groups, 1)


def attend_prompt(
    asked: TurnedAttention, attend: Attend, kernels: Kernels = OPERATIONS
) -> mx.array:
    """Attend with several queries, which share one look-up of all keys and values."""
    queries, keys, values, scale, mask, sinks = asked
    dtype = queries.dtype
    if sinks is not None:
        attend = partial(mx.fast.scaled_dot_product_attention, sinks=sinks)
    restored = kernels.restore(keys, values, dtype)
    if restored is not None:
        return attend(queries, *restored, scale=scale, mask=mask)
    turned = keys.layout.rotated(queries).astype(dtype)
    wide = [states.rotated().astype(dtype) for states in (keys, values)]
    output = attend(turned, *wide, scale=scale, mask=mask)
    return values.layout.restored(output.astype(mx.float32)).astype(dtype)


def attend_step(asked: TurnedAttention, kernels: Kernels = OPERATIONS) -> mx.array:
    """Attend with one query a row (B, H, 1, D); by a kernel if ``keys.by_kernel``."""
    queries, keys, values, scale, _, sinks = asked
    if _takes_upstreams(asked):
        return _by_upstream(asked)
    mask = asked.by_group()
    if keys.by_kernel and sinks is None:
        found = kernels.attend(queries, keys, values, scale, mask)
        if found is not None:
            return found
    turned, extra = asked.turned(), asked.sinks_by_group()
    output = None
    if lookups.is_numpys():
        rows = range(len(queries))
        pairs = [(keys.of_row(row), values.of_row(row)) for row in rows]
        output = _by_numpy(turned, pairs, mask, extra)
    if output is None:
        output = _by_blocks(turned, keys, values, mask, extra, queries.dtype)
    return asked.turned_back(output)


# By kernels -----------------------------------------------------------------------------------------------------------


def _takes_upstreams(asked: TurnedAttention) -> bool:
    """Whether mlx-vlm's fused kernels, which are Metal's and for one row, take a step."""
    is_plain = asked.sinks is None and not isinstance(asked.mask, mx.array)
    return is_plain and asked.queries.shape[0] == 1 and device() is Device.METAL


def _by_upstream(asked: TurnedAttention) -> mx.array:
    """Attend with one row's query (1, H, 1, D) by mlx-vlm's own function: (1, H, 1, D_v)."""
    keys, values = asked.keys, asked.values
    given = [
        TurboQuantMSEState(states.norms[..., 0], states.codes)
        for states in (keys, values)
    ]
    cache = _upstreams_cache(keys.layout, values.layout)
    found: mx.array = cache.decode_attention(asked.queries, *given, scale=asked.scale)
    return found


@lru_cache(maxsize=16)
def _upstreams_cache(keys: TurboLayout, values: TurboLayout) -> TurboQuantKVCache:
    """Return an empty cache of mlx-vlm's with these codecs."""
    cache = TurboQuantKVCache(keys.bits, keys.seed, keys.bits, values.bits)
    cache.key_codec, cache.value_codec = (
        _TurboQuantMSECodec(layout.depth, layout.bits, layout.seed)
        for layout in (keys, values)
    )
    return cache


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
        @ keys.between(begin, end).directions(dtype).swapaxes(-1, -2)
        for begin, end in _blocks(keys)
    ]
    scores = joined(found, axis=3).astype(mx.float32) * _row_of(keys.norms)
    if mask is not None:
        scores = scores + added(mask, mx.float32)
    weights = _softmax(scores, sinks) * _row_of(values.norms)
    total: Any = 0
    for begin, end in _blocks(values):
        block = values.between(begin, end).directions(dtype)
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


def attend_rows(
    queries: mx.array, keys: RowStates, values: RowStates, *terms: Any
) -> mx.array | None:
    """Attend with one query (B, H, 1, D) of each row over its own cache, all in one call; None on a GPU.

    Empty places give zeros.

    Args:
        terms: The further ones of ``TurnedAttention``.
    """
    pairs = _pairs(keys, values)
    asked = TurnedAttention(queries, keys.live, values.live, *terms)
    if pairs is None or not lookups.is_numpys() or asked.mask is not None:
        return None
    found = _by_numpy(asked.turned(), pairs, None, asked.sinks_by_group())
    return None if found is None else asked.turned_back(found)


def _pairs(keys: RowStates, values: RowStates) -> list[Pair | None] | None:
    """Return each place's codes; None if rows hold anything else."""
    pairs: list[Pair | None] = []
    for own_keys, own_values in zip(keys.rows, values.rows, strict=True):
        if own_keys is None:
            pairs.append(None)
        elif isinstance(own_keys, TurboStates):
            pairs.append((own_keys, cast(TurboStates, own_values)))
        else:
            return None
    return pairs


def _by_numpy(
    queries: mx.array,
    pairs: Sequence[Pair | None],
    mask: mx.array | None,
    sinks: mx.array | None,
) -> mx.array | None:
    """Do what ``_by_blocks`` does for each row's keys and values, in one evaluation; codes are looked up by numpy.

    None while MLX traces. A row's numbers depend on that row alone.
    """
    live = [pair for pair in pairs if pair is not None]
    parts = [part for pair in live for states in pair for part in states.parts]
    given = [one for one in (mask, sinks) if one is not None]
    if not exponentials.evaluated(queries, *parts, *given):
        return None
    hidden = None if mask is None else _numbers(mask)
    extra = None if sinks is None else view(sinks)[0]
    batch, groups, shared, _ = queries.shape
    found = np.zeros((batch, groups, shared, live[0][1].layout.depth), np.float32)
    rows = view(queries)
    with np.errstate(all="ignore"):
        for row, pair in enumerate(pairs):
            if pair is None:
                continue
            own = None if hidden is None else hidden[min(row, len(hidden) - 1)]
            keys, values = map(_CodedRow.of, pair)
            found[row] = _attend_row(rows[row], keys, values, own, extra)
    return mx.array(found)


def _numbers(mask: mx.array) -> np.ndarray:
    """Return a mask as numbers to add (B, G, R, K)."""
    if mask.dtype != mx.bool_:
        return np.array(mask.astype(mx.float32))
    return np.where(np.array(mask), np.float32(0), HIDDEN)


class _CodedRow(NamedTuple):
    """One row's coded keys or values, in numpy's eyes."""

    norms: np.ndarray  # (G, 1, K)
    words: np.ndarray  # (G, K, W)
    layout: TurboLayout

    @classmethod
    def of(cls, states: TurboStates) -> _CodedRow:
        norms, codes = map(view, states.parts)
        return cls(norms[0].swapaxes(-1, -2), codes[0], states.layout)

    def until(self, end: int) -> _CodedRow:
        return self._replace(norms=self.norms[..., :end], words=self.words[:, :end])

    def blocks(self, shared: int) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield columns, and their directions (G, K, D), for ``shared`` rows of a product."""
        columns = self.words.shape[1]
        step = max(FEWEST_COLUMNS, PRODUCT // shared)
        for begin in range(0, columns, step):
            own = slice(begin, min(begin + step, columns))
            block = lookups.block(self.words[:, own], *self.layout.coding)
            yield own, block[..., : self.layout.depth]


def _attend_row(
    queries: np.ndarray,
    keys: _CodedRow,
    values: _CodedRow,
    mask: np.ndarray | None,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """Attend with one row's rotated queries (G, R, D): rotated (G, R, D_v). ``mask``: (G or 1, R or 1, K)."""
    if mask is not None:
        end = _end(mask)
        keys, values, mask = keys.until(end), values.until(end), mask[..., :end]
    groups, shared, _ = queries.shape
    scores = np.empty((groups, shared, keys.words.shape[1]), np.float32)
    for own, block in keys.blocks(shared):
        scores[..., own] = queries @ block.swapaxes(-1, -2)
    scores *= keys.norms
    if mask is not None:
        scores += mask
    highest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        highest = np.maximum(highest, sinks)
    scores -= highest
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks - highest)
    scores *= values.norms
    output = np.zeros((groups, shared, values.layout.depth), np.float32)
    for own, block in values.blocks(shared):
        output += scores[..., own] @ block
    output /= total
    return output


def _end(mask: np.ndarray) -> int:
    """Return how many columns any head sees, up to the last."""
    is_seen = (mask > HIDDEN / 2).reshape(-1, mask.shape[-1]).any(axis=0)
    columns = np.nonzero(is_seen)[0]
    return int(columns[-1]) + 1 if columns.size else 1
