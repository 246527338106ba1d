"""Forwards with drafts: a row of a batch has several positions.

The model sees each position as a row with one token. Caches append a row's positions together; each sees those before.
``LayerCache.keep`` drops the rest. Views of layers (``LayerCache.drafted``) share this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

#: No limit on drafted positions.
NO_LIMIT = 2**16
#: Most bytes of recurrent states after later positions, which are held until a forward's tokens are read.
MOST_STATE_BYTES = 2**30


def most_positions(layers: Sequence[Any]) -> int:
    """Return the most positions of a row; 1 if a layer cannot drop any."""
    most = min([NO_LIMIT, *(layer.most_positions for layer in layers)])
    state_bytes = sum(layer.state_bytes for layer in layers)
    if state_bytes:
        most = min(most, 1 + MOST_STATE_BYTES // state_bytes)
    return max(1, most)


#: Everything.
ALL = slice(None)


def index_of(rows: Sequence[int], size: int = -1) -> slice | mx.array:
    """Return an index of rows; ``ALL`` if they are all of ``size``."""
    wanted = list(rows)
    if wanted == list(range(size)):
        return ALL
    first, end = wanted[0], wanted[-1] + 1
    step = wanted[1] - first if len(wanted) > 1 else 1
    if step > 0 and wanted == list(range(first, end, step)):
        return slice(first, end, step)
    return mx.array(wanted)


def rows_of(array: mx.array, index: slice | mx.array) -> mx.array:
    return array if index is ALL else array[index]


@dataclass(frozen=True)
class Square:
    """N positions of S places, padded to ``count`` of each."""

    counts: tuple[int, ...]
    there: slice | mx.array  # (S * count,) of N
    back: slice | mx.array  # (N,) of S * count

    @classmethod
    @lru_cache(maxsize=8)
    def of(cls, counts: tuple[int, ...]) -> Square:
        each = np.array(counts)[:, None]
        aheads = np.arange(max(counts))
        begins = each.cumsum(axis=0) - each
        # a shorter row's last position stands for those that it lacks
        there = begins + np.minimum(aheads, each - 1)
        back = np.flatnonzero(aheads < each)
        return cls(
            counts,
            index_of(there.ravel().tolist(), sum(counts)),
            index_of(back.tolist(), there.size),
        )

    @property
    def count(self) -> int:
        return max(self.counts)

    def padded(self, array: mx.array) -> mx.array:
        """Return (N, ...) as (S, count, ...)."""
        return rows_of(array, self.there).reshape(-1, self.count, *array.shape[1:])

    def flat(self, array: mx.array) -> mx.array:
        """Return (S, count, ...) as (N, ...)."""
        return rows_of(array.reshape(-1, *array.shape[2:]), self.back)


@dataclass(frozen=True)
class DraftedStates:
    """A slab's keys or values (S, H, C, D) for a square of queries, shared or one per ``ahead``."""

    slabs: Sequence[Any]
    square: Square

    @property
    def shape(self) -> tuple[int, int, int, int]:
        _, heads, columns, depth = self.slabs[0].shape
        return (sum(self.square.counts), heads, columns, depth)

    def of(self, ahead: int) -> Any:
        """Return the slab that query ``ahead`` sees."""
        return self.slabs[min(ahead, len(self.slabs) - 1)]


def each_position(
    attention: Callable[[mx.array, mx.array | None, Any], mx.array],
    x: mx.array,
    mask: mx.array | None,
    cache: Any,
) -> mx.array:
    """Run attention (B, L, D) stepwise over a ``DraftedSlab``, for classes that multiply a slab's arrays."""
    square: Square = cache.square
    each = square.padded(x)
    masks = None if mask is None else square.padded(mask)
    found: list[mx.array] = []
    with cache.steps() as layer:
        for ahead in range(square.count):
            own = None if masks is None else masks[:, ahead]
            found.append(attention(each[:, ahead], own, layer))
    return square.flat(mx.stack(found, axis=1))


def attend_drafted(
    attention: Callable[..., mx.array],
    queries: mx.array,
    keys: DraftedStates,
    values: DraftedStates,
    cache: Any,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None,
    *,
    is_fixed: bool,
) -> mx.array:
    """Attend with queries (N, H, 1, D) over a slab.

    ``is_fixed``: each call has one query per place, as without drafts.
    """
    settings: dict[str, Any] = {"scale": scale}
    if sinks is not None:
        settings["sinks"] = sinks
    square = keys.square
    apart = square.padded(queries[:, :, 0])  # (S, count, H, D)
    masks = _masks_of(square, mask)
    share_slab = len(keys.slabs) == 1 and isinstance(keys.of(0), mx.array)
    share_mask = masks is None or masks.shape[2] == 1
    if share_slab and share_mask and not is_fixed:
        # (S, 1, count, C)
        wide = None if masks is None else masks[:, :, 0].swapaxes(1, 2)
        together = apart.swapaxes(1, 2)
        found = attention(
            together, keys.of(0), values.of(0), cache, mask=wide, **settings
        )
        found = found.swapaxes(1, 2)  # (S, count, H, D_v)
        return square.flat(found)[:, :, None]
    each: list[mx.array] = []
    for ahead in range(square.count):
        query, own = apart[:, ahead, :, None], None
        if masks is not None:
            own = masks[:, min(ahead, masks.shape[1] - 1)]
        found = attention(
            query, keys.of(ahead), values.of(ahead), cache, mask=own, **settings
        )
        each.append(found[:, :, 0])
    return square.flat(mx.stack(each, axis=1))[:, :, None]


def _masks_of(square: Square, mask: mx.array | None) -> mx.array | None:
    """Return the masks (S, count, ...) of a square's positions; (1, 1, ...) if all share one."""
    if mask is None:
        return None
    if mask.shape[0] == 1:
        return mask[:, None]
    return square.padded(mask)
