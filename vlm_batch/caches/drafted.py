"""Forwards with drafts: a row of a batch has several positions.

The model sees each position as a row with one token. The caches append a row's positions together; each sees those
before. ``LayerCache.keep`` drops the rest. Each kind of layer has its own view (``LayerCache.drafted``); here is what
they share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

#: No limit on drafted positions.
NO_LIMIT = 2**16
#: Most bytes of recurrent states after later positions, which are held until a forward's tokens are read.
MOST_STATE_BYTES = 2**30


def most_positions(layers: Sequence[Any]) -> int:
    """Return the most positions of a row; 1 if a layer cannot drop any."""
    states = sum(layer.state_bytes for layer in layers)
    limit = 1 + MOST_STATE_BYTES // states if states else NO_LIMIT
    return max(1, min([limit, *(layer.most_positions for layer in layers)]))


@dataclass(frozen=True)
class DraftedStates:
    """A slab's keys or values (S, H, C, D) for ``count`` queries per place, shared or one each."""

    slabs: Sequence[Any]
    count: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        places, heads, columns, depth = self.slabs[0].shape
        return (places * self.count, heads, columns, depth)

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
    count = cache.count
    with cache.steps() as layer:
        found = [
            attention(x[ahead::count], mask if mask is None else mask[ahead::count], layer) for ahead in range(count)
        ]
    return mx.stack(found, axis=1).reshape(x.shape[0], *found[0].shape[1:])


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
    """Attend with queries (S * count, H, 1, D) over a slab.

    ``is_fixed``: each call has one query per place, as without drafts.
    """
    extra = {} if sinks is None else {"sinks": sinks}
    count, heads = keys.count, queries.shape[1]
    apart = queries.reshape(-1, count, heads, queries.shape[3])  # (S, count, H, D)
    shown = None if mask is None else mask.reshape(-1, count, *mask.shape[1:]) if mask.shape[0] > 1 else mask[:, None]
    is_one = len(keys.slabs) == 1 and isinstance(keys.of(0), mx.array)
    if is_one and not is_fixed and (shown is None or shown.shape[2] == 1):
        wide = None if shown is None else shown[:, :, 0].swapaxes(1, 2)  # (S, 1, count, C)
        found = attention(apart.swapaxes(1, 2), keys.of(0), values.of(0), cache, scale=scale, mask=wide, **extra)
        found = found.swapaxes(1, 2)  # (S, count, H, D_v)
    else:
        each = [
            attention(
                apart[:, ahead, :, None],
                keys.of(ahead),
                values.of(ahead),
                cache,
                scale=scale,
                mask=None if shown is None else shown[:, min(ahead, shown.shape[1] - 1)],
                **extra,
            )[:, :, 0]
            for ahead in range(count)
        ]
        found = mx.stack(each, axis=1)
    return found.reshape(-1, heads, 1, found.shape[-1])
