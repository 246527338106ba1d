"""Layers whose rows keep single-row caches, with one attention call per row.

Fastest on a CPU; on a GPU launches dominate (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache, cache_nbytes

from vlm_batch.arrays import arrays_of, joined, lengths_array
from vlm_batch.caches.layers import LayerCache, kind_of

#: States of keys and of values at an empty place.
NOTHING = (None, None)


@dataclass(frozen=True)
class RowStates:
    """Keys or values of rows of different lengths, in an array's place.

    Attributes:
        rows: each row's, (1, H, L, D) or quantised; None for an empty place.
        counts: how many places each takes. At several lie successive positions of a row, of which the last sees all.
    """

    rows: tuple[Any | None, ...]
    counts: tuple[int, ...]

    @property
    def live(self) -> Any:
        """The first row's, or None."""
        return next((row for row in self.rows if row is not None), None)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, longest L, D)"""
        shapes = [row.shape for row in self.rows if row is not None]
        _, heads, _, width = shapes[0]
        longest = max(shape[2] for shape in shapes)
        return (sum(self.counts), heads, longest, width)

    def apart(self) -> RowStates:
        """Return what each place sees."""
        found: list[Any] = []
        for row, count in zip(self.rows, self.counts, strict=True):
            if count == 1:
                found.append(row)
                continue
            whole: Any = row
            for end in range(whole.shape[2] - count + 1, whole.shape[2] + 1):
                found.append(whole[:, :, :end])
        return RowStates(tuple(found), (1,) * len(found))


def _both(
    pairs: Sequence[tuple[Any, Any]], counts: Sequence[int]
) -> tuple[RowStates, RowStates]:
    """Return rows' keys and their values."""
    keys, values = zip(*pairs, strict=True)
    return RowStates(keys, tuple(counts)), RowStates(values, tuple(counts))


@dataclass(frozen=True)
class RowMasks:
    """Each place's mask; None attends to the whole cache."""

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
    """Attend with queries (B, H, 1, D), one call for each row. Empty places give zeros."""
    settings: dict[str, Any] = {"cache": None, "scale": scale}
    if sinks is not None:
        settings["sinks"] = sinks
    if mask is not None:
        keys, values = keys.apart(), values.apart()
    outputs: list[mx.array | None] = []
    end = 0
    for own_keys, own_values, count in zip(
        keys.rows, values.rows, keys.counts, strict=True
    ):
        first, end = end, end + count
        if own_keys is None:
            outputs.append(None)
            continue
        of_row, own_mask = queries[first:end], _mask_of(mask, first)
        if count > 1:
            # successive positions are one row's queries
            of_row, own_mask = of_row.swapaxes(0, 2), _causal(own_keys, count)
        found = attention(of_row, own_keys, own_values, mask=own_mask, **settings)
        outputs.append(found.swapaxes(0, 2) if count > 1 else found)
    return joined(_filled(outputs, queries))


def _filled(outputs: Sequence[mx.array | None], queries: mx.array) -> list[mx.array]:
    """Put zeros for empty places; they may have another width than queries and values."""
    like = next((output for output in outputs if output is not None), queries)
    return [mx.zeros_like(like[:1]) if output is None else output for output in outputs]


def _mask_of(mask: RowMasks | mx.array | None, place: int) -> mx.array | None:
    if isinstance(mask, RowMasks):
        return mask.rows[place]
    if mask is None or mask.ndim < 4 or mask.shape[0] == 1:
        return mask
    return mask[place : place + 1]


def _causal(keys: mx.array, count: int) -> mx.array:
    """Return the mask (count, L) of a row's last positions."""
    length = keys.shape[2]
    last = mx.arange(length - count, length)
    return mx.arange(length) <= last[:, None]


class RowsCache(LayerCache):
    """One layer of a batch; ``places[b]``: the cache of place b, or None."""

    def __init__(self) -> None:
        self.places: list[Any | None] = []

    def put(self, place: int, cache: Any) -> None:
        """Adopt a row's cache without a copy."""
        self.places[place] = cache

    def extract(self, place: int) -> Any:
        return self.places[place]

    def clear(self, place: int) -> None:
        self.places[place] = None

    def keep_places(self, places: list[int]) -> None:
        """Keep these places, in their order."""
        self.places = [self.places[place] for place in places]

    def resize(self, num_places: int) -> None:
        del self.places[num_places:]
        self.places.extend([None] * (num_places - len(self.places)))

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(0 if cache is None else int(cache.offset) for cache in self.places)

    @property
    def offset(self) -> mx.array:
        """``lengths`` as an array (B,), for RoPE."""
        return lengths_array(self.lengths)

    @property
    def _idx(self) -> int:
        """The longest row, as mlx-vlm names it."""
        return max(self.lengths, default=0)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[RowStates, RowStates]:
        return self._states(
            lambda cache, place: cache.update_and_fetch(
                keys[place : place + 1], values[place : place + 1]
            )
        )

    @property
    def state(self) -> tuple[RowStates, RowStates]:
        """All keys and values, for layers that share them."""
        return self._states(lambda cache, place: cache.state)

    def _states(
        self, read: Callable[[Any, int], tuple[Any, Any]]
    ) -> tuple[RowStates, RowStates]:
        pairs = [
            NOTHING if cache is None else read(cache, place)
            for place, cache in enumerate(self.places)
        ]
        return _both(pairs, (1,) * len(pairs))

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> RowMasks | None:
        """Return the rows' masks for one token; None if no row needs one."""
        if length != 1:
            raise ValueError(f"a batch decodes one token a row, not {length}")
        return _masks([_mask_for(cache, window_size) for cache in self.places])

    @property
    def live(self) -> list[Any]:
        # another thread may ask while rows leave
        return [cache for cache in tuple(self.places) if cache is not None]

    @property
    def nbytes(self) -> int:
        return sum(cache_nbytes(cache) for cache in self.live)

    def arrays(self) -> list[mx.array]:
        return arrays_of([cache.state for cache in self.live])

    @property
    def most_positions(self) -> int:
        most = [
            kind_of(cache).most_positions(is_fixed=self.always_masked)
            for cache in self.live
        ]
        return min(most, default=1)

    def drafted(self, counts: Sequence[int]) -> DraftedRows:
        return DraftedRows(self, counts)

    def keep(self, place: int, kept: int, of: int) -> None:
        if of > 1:
            kind_of(self.places[place]).keep(kept, of)


def _masks(rows: Sequence[mx.array | None]) -> RowMasks | None:
    """Return places' masks, or None if no place has one."""
    if all(mask is None for mask in rows):
        return None
    return RowMasks(tuple(rows))


def _mask_for(cache: Any | None, window_size: int | None) -> mx.array | None:
    """Return a row's mask for one token."""
    if cache is None:
        return None
    found: mx.array | None = cache.make_mask(
        1, window_size=window_size, return_array=False
    )
    return found


class DraftedRows(RowsCache):
    """A ``RowsCache`` with ``counts[p]`` positions of place p, each attending separately."""

    def __init__(self, layer: RowsCache, counts: Sequence[int]) -> None:
        super().__init__()
        self.always_masked = layer.always_masked
        self._layer, self._counts = layer, tuple(counts)
        self._before: list[int] = []  # tokens that each position sees before its own
        self._appended: tuple[RowStates, RowStates] | None = None
        each = zip(layer.places, layer.lengths, counts, strict=True)
        for cache, length, count in each:
            if count > 1:
                kind_of(cache).draft(count)
            self.places += [cache] * count
            self._before += range(length, length + count)

    @property
    def lengths(self) -> tuple[int, ...]:
        if self._appended is None:
            return tuple(self._before)
        return tuple(
            before if cache is None else before + 1
            for before, cache in zip(self._before, self.places, strict=True)
        )

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[RowStates, RowStates]:
        pairs: list[tuple[Any, Any]] = []
        counts: list[int] = []
        ends = accumulate(self._counts)
        for cache, count, end in zip(
            self._layer.places, self._counts, ends, strict=True
        ):
            first = end - count
            own = self._append(cache, keys[first:end], values[first:end])
            pairs += own
            counts += [count] if len(own) == 1 else [1] * count
        self._appended = _both(pairs, counts)
        return self._appended

    def _append(
        self, cache: Any | None, keys: mx.array, values: mx.array
    ) -> list[tuple[Any, Any]]:
        """Append a row's positions (N, H, 1, D) together. Return what all see, or what each sees of it."""
        count = len(keys)
        if cache is None:
            return [NOTHING] * count
        both = cache.update_and_fetch(keys.swapaxes(0, 2), values.swapaxes(0, 2))
        is_shared = type(cache) is KVCache and not self.always_masked
        if is_shared or count == 1:
            return [both]
        return list(zip(*(_seen(part, cache, count) for part in both), strict=True))

    @property
    def state(self) -> tuple[RowStates, RowStates]:
        assert self._appended is not None
        return self._appended

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> RowMasks | None:
        if length != 1:
            raise ValueError(f"a position has one token, not {length}")
        masks: list[mx.array | None] = []
        for cache, count in zip(self._layer.places, self._counts, strict=True):
            for ahead in range(count):
                masks.append(_mask_ahead(cache, ahead, window_size))
        return _masks(masks)


def _seen(states: Any, cache: Any, count: int) -> Iterator[Any]:
    """Yield what each of a row's last ``count`` positions sees."""
    window = kind_of(cache).span
    length = states.shape[2]
    for end in range(length - count + 1, length + 1):
        begin = 0 if window is None else max(0, end - window)
        if isinstance(states, mx.array):
            yield states[:, :, begin:end]
        else:
            yield states.between(begin, end)


def _mask_ahead(
    cache: Any | None, ahead: int, window_size: int | None
) -> mx.array | None:
    """Return a row's mask for the token behind its first ``ahead`` drafted ones."""
    if cache is None:
        return None
    counter = kind_of(cache).counter
    counter.offset += ahead
    try:
        return _mask_for(cache, window_size)
    finally:
        counter.offset -= ahead
