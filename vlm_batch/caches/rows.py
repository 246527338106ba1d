"""One layer of a batch where every row keeps its own single-row cache: one attention call per row, no padding.

Right by construction for every cache kind that mlx-vlm has for one row. On a CPU it is also the fastest (no padded
columns); on a GPU launches dominate and ``SlabCache`` is better (measured, docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import cache_nbytes

from vlm_batch.arrays import arrays_of


@dataclass(frozen=True)
class Run:
    """Keys or values (R, H, L, D) of the places [first, end), which are one array, and the cache that they are in."""

    first: int
    end: int
    state: mx.array
    cache: Any


@dataclass(frozen=True)
class RowStates:
    """Keys or values of each place of the batch, of different lengths: what a model gets instead of one (B, H, L, D)
    array.

    ``rows[b]`` is whatever the row's own cache returned ((1, H, L_b, D), or a quantised tuple), or None for an empty
    place. Of rows that are one array it is a part, and ``runs`` has the whole.
    """

    rows: tuple[Any | None, ...]
    caches: tuple[Any | None, ...]
    runs: tuple[Run, ...] = ()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, longest L, D), for models that ask how many keys there are."""
        shapes = [row.shape for row in self.rows if row is not None]
        return (len(self.rows), shapes[0][1], max(shape[2] for shape in shapes), shapes[0][3])


@dataclass(frozen=True)
class RowMasks:
    """The masks of each place; None attends to everything in the row's cache."""

    rows: tuple[mx.array | None, ...]


def attend_rows(
    attention: Callable[..., mx.array],
    queries: mx.array,
    keys: RowStates,
    values: RowStates,
    scale: float,
    mask: RowMasks | mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of (B, H, 1, D) queries over rows of different lengths: ``attention`` is called once for each live row, and
    once for rows that are one array, unless they are masked.

    An empty place answers zeros, so that the places stay aligned.
    """
    extra = {} if sinks is None else {"sinks": sinks}
    runs = (
        {} if mask is not None else {run.first: (run, other) for run, other in zip(keys.runs, values.runs, strict=True)}
    )
    outputs: list[mx.array | None] = []  # of a row, of several, or of an empty place
    place = 0
    while place < len(keys.rows):
        row_keys, row_values, cache = keys.rows[place], values.rows[place], keys.caches[place]
        own_mask, end = _mask_of(mask, place), place + 1
        if place in runs:
            run, other = runs[place]
            row_keys, row_values, cache, end = run.state, other.state, run.cache, run.end
        if row_keys is None:
            outputs.append(None)
        else:
            of_rows = queries[place:end]
            outputs.append(attention(of_rows, row_keys, row_values, cache, scale=scale, mask=own_mask, **extra))
        place = end
    like = next((output[:1] for output in outputs if output is not None), queries[:1])  # values may be of another width
    filled = [mx.zeros_like(like) if output is None else output for output in outputs]
    return filled[0] if len(filled) == 1 else mx.concatenate(filled, axis=0)


def _mask_of(mask: RowMasks | mx.array | None, place: int) -> mx.array | None:
    if mask is None:
        return None
    if isinstance(mask, RowMasks):
        return mask.rows[place]
    return mask[place : place + 1] if mask.ndim == 4 and mask.shape[0] > 1 else mask


class RowsCache:
    """One layer of the batch: ``places[b]`` is the single-row cache of the row at place b, or None."""

    def __init__(self) -> None:
        self.places: list[Any | None] = []
        self._offsets: tuple[tuple[int, ...], mx.array] | None = None

    def put(self, place: int, cache: Any) -> None:
        """Adopt a row's own cache; nothing is copied."""
        self.places[place] = cache

    def take(self, place: int) -> Any:
        """The row's own cache again: what ``put`` was given, with what it has seen since."""
        return self.places[place]

    def clear(self, place: int) -> None:
        """Forget the row at a place."""
        self.places[place] = None

    def remove(self, place: int) -> None:
        """Forget the row at a place and close the gap."""
        del self.places[place]

    def resize(self, num_places: int) -> None:
        """Keep the first places only (the others are empty)."""
        del self.places[num_places:]
        self.places.extend([None] * (num_places - len(self.places)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens that each place has seen; 0 for an empty one."""
        return tuple(0 if cache is None else int(cache.offset) for cache in self.places)

    @property
    def offset(self) -> mx.array:
        """``lengths`` as an array (B,), as models want it for RoPE."""
        lengths = self.lengths
        if self._offsets is None or self._offsets[0] != lengths:
            self._offsets = (lengths, mx.array(lengths, dtype=mx.int32))
        return self._offsets[1]

    @property
    def _idx(self) -> int:
        """The longest row; mlx-vlm reads it as the batch's shared column."""
        return max(self.lengths, default=0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowStates, RowStates]:
        """Append (B, H, 1, D) keys and values, each place's to its own row."""
        fetched = [
            (None, None) if cache is None else cache.update_and_fetch(keys[b : b + 1], values[b : b + 1])
            for b, cache in enumerate(self.places)
        ]
        return self._states([f[0] for f in fetched]), self._states([f[1] for f in fetched])

    def fetch(self) -> tuple[RowStates, RowStates]:
        """All that the rows hold, without adding to it (cross-attention, shared KV)."""
        states = [(None, None) if cache is None else cache.state for cache in self.places]
        return self._states([s[0] for s in states]), self._states([s[1] for s in states])

    @property
    def state(self) -> tuple[RowStates, RowStates]:
        return self.fetch()

    def make_mask(self, length: int, window_size: int | None = None, return_array: bool = False) -> RowMasks | None:
        """Each row's own mask for one new token, or None if no row needs one."""
        if length != 1:
            raise ValueError(f"a batch decodes one token a row, not {length}")
        masks = tuple(
            None if cache is None else cache.make_mask(1, window_size=window_size, return_array=False)
            for cache in self.places
        )
        return None if all(mask is None for mask in masks) else RowMasks(masks)

    @property
    def nbytes(self) -> int:
        return sum(cache_nbytes(cache) for cache in self.places)

    def arrays(self) -> list[mx.array]:
        """Every array that is held, to be evaluated."""
        return arrays_of([cache.state for cache in self.places if cache is not None])

    def _states(self, rows: Sequence[Any | None]) -> RowStates:
        return RowStates(tuple(rows), tuple(self.places))
